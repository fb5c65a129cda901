"""Events, named in the past tense. Every event carries `at`: seconds since the session started.

Time is data: the body reads the clock once per event, and `at` never decreases.
"""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core.ids import ActionId, EngineId, HostId, StepId, TrajectoryId
from heddle_dask.core.nouns import (
    ActionRequest,
    EngineDescription,
    HostDescription,
    StepRequest,
    TrajectorySpec,
)
from heddle_dask.core.prediction import Prediction
from heddle_dask.core.tp_degrees import DegreeRequest, TpDegreePlan


@dataclass(frozen=True, slots=True)
class TrajectorySubmitted:
    """The driver submitted a trajectory, which waits for admission."""

    at: float
    trajectory: TrajectorySpec


@dataclass(frozen=True, slots=True)
class TrajectoryForked:
    """The program of `parent` went on in a second context, which is a trajectory of its own from here on.

    It does not wait for admission: its parent is admitted, and may wait for it.
    """

    at: float
    trajectory: TrajectorySpec
    parent: TrajectoryId


@dataclass(frozen=True, slots=True)
class TrajectoryEnded:
    """The program of a trajectory returned or failed, or the driver gave it up."""

    at: float
    trajectory_id: TrajectoryId
    status: str


@dataclass(frozen=True, slots=True)
class StepRequested:
    """A trajectory requests an LLM step, or requests one again, whole or its rest (`attempt` > 0)."""

    at: float
    step: StepRequest


@dataclass(frozen=True, slots=True)
class StepStarted:
    """The step has started on its engine.

    Simulated, it holds a slot. Live, its worker has sent it to the engine's process, where it holds a slot or waits in
    the engine's own queue; the engine does not report which, so `Engine.running` and `Engine.ahead` are an estimate.
    """

    at: float
    step_id: StepId
    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The engine returned a result; an aborted request returns the tokens it has."""

    at: float
    step_id: StepId
    engine_id: EngineId
    new_tokens: int
    cached_tokens: int
    finish_reason: str
    policy_version: int = 0


@dataclass(frozen=True, slots=True)
class StepDelivered(StepFinished):
    """The driver has the result of a step that the controller still counts as open.

    The driver may get a result before the scheduler does. `StepFinished` then arrives later and is ignored as stale, or
    never arrives because the worker died; the step may have been placed again meanwhile.
    """


ENGINE_LOST = "engine-lost"
"""Cause of a `StepFailed`: the engine died or did not exist."""


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The step ended without a result; `cause` names the boundary. The driver decides how to go on."""

    at: float
    step_id: StepId
    engine_id: EngineId
    cause: str


@dataclass(frozen=True, slots=True)
class StepCancelled:
    """The program no longer waits for this step: it goes on without it, requests another, or ends."""

    at: float
    step_id: StepId


@dataclass(frozen=True, slots=True)
class PredictionMade:
    """The answer to a `PredictRemaining`, for the trajectory after `steps_finished` steps."""

    at: float
    trajectory_id: TrajectoryId
    steps_finished: int
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """A move of a context has succeeded or failed; `seconds` and `tokens` are those of the move.

    `source_engine_id` distinguishes this move from an earlier one to the same target whose report may still be in
    transit.
    """

    at: float
    trajectory_id: TrajectoryId
    target_engine_id: EngineId
    ok: bool
    kind: str
    seconds: float
    tokens: int = 0
    cause: str = ""
    source_engine_id: EngineId | None = None


@dataclass(frozen=True, slots=True)
class ActionRequested:
    """A trajectory requests a tool or reward call."""

    at: float
    action: ActionRequest


@dataclass(frozen=True, slots=True)
class ActionFinished:
    """The action ended on its host; also if the tool failed (`ok` is False).

    `ran` is False for an action that was cancelled before it started: its seconds do not count as a tool time.
    """

    at: float
    action_id: ActionId
    host_id: HostId
    run_s: float
    ok: bool = True
    ran: bool = True


@dataclass(frozen=True, slots=True)
class EngineJoined:
    """A warmed-up engine has joined and takes steps."""

    at: float
    engine: EngineDescription


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine is lost.

    `stranded`: its worker is lost too, so none of its steps will report; otherwise each of its steps still ends in a
    `StepFailed`.
    """

    at: float
    engine_id: EngineId
    reason: str
    stranded: bool


@dataclass(frozen=True, slots=True)
class EngineDraining:
    """The engine is to be left: it takes no new step, and what it has finishes or moves away.

    Attributes
    ----------
    ends_at
        When it will end, in seconds since the session started; None when that is not known.
    """

    at: float
    engine_id: EngineId
    ends_at: float | None = None


@dataclass(frozen=True, slots=True)
class EngineExpiring:
    """A draining engine ends in a moment: its steps must stop now, for their tokens to come back."""

    at: float
    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class HostJoined:
    """A worker for actions has joined."""

    at: float
    host: HostDescription


@dataclass(frozen=True, slots=True)
class HostDraining:
    """The worker for actions is to be left: it takes no new action, and its running ones may finish."""

    at: float
    host_id: HostId


@dataclass(frozen=True, slots=True)
class HostLost:
    """A worker for actions is lost; its running actions will never report."""

    at: float
    host_id: HostId


@dataclass(frozen=True, slots=True)
class DegreesRequested:
    """A batch is about to start, and engines may change before; a newer request supersedes an open one."""

    at: float
    request: DegreeRequest


@dataclass(frozen=True, slots=True)
class DegreesPlanned:
    """The answer to a `PlanDegrees`. Without a plan the engines stay as they are, and `cause` says why."""

    at: float
    request_id: int
    plan: TpDegreePlan | None
    cause: str = ""


Event = (
    TrajectorySubmitted
    | TrajectoryForked
    | TrajectoryEnded
    | StepRequested
    | StepStarted
    | StepFinished
    | StepDelivered
    | StepFailed
    | StepCancelled
    | PredictionMade
    | MoveEnded
    | ActionRequested
    | ActionFinished
    | EngineJoined
    | EngineLost
    | EngineDraining
    | EngineExpiring
    | HostJoined
    | HostDraining
    | HostLost
    | DegreesRequested
    | DegreesPlanned
)
