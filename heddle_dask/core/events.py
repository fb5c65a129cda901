"""Facts, in the past tense. Every event carries `at`: seconds since the session started.

Time is data: whoever feeds the controller reads the clock once and never lets it go back.
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
    """The driver announced a trajectory; it waits to be admitted."""

    at: float
    trajectory: TrajectorySpec


@dataclass(frozen=True, slots=True)
class TrajectoryEnded:
    """The program of a trajectory returned, failed, or was given up by the driver."""

    at: float
    trajectory_id: TrajectoryId
    status: str


@dataclass(frozen=True, slots=True)
class StepRequested:
    """A trajectory asks for an LLM step (or for the rest of one: `attempt` > 0)."""

    at: float
    step: StepRequest


@dataclass(frozen=True, slots=True)
class StepStarted:
    """The step left the engine's queue: it holds a slot now."""

    at: float
    step_id: StepId
    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The engine answered; an aborted request with the tokens it had is an answer too."""

    at: float
    step_id: StepId
    engine_id: EngineId
    new_tokens: int
    cached_tokens: int
    finish_reason: str
    policy_version: int = 0


@dataclass(frozen=True, slots=True)
class StepDelivered(StepFinished):
    """The driver has the answer of a step that the controller still believes open.

    It comes by a shorter way than `StepFinished`, which follows and is late then, or never comes: the worker died
    in between, and the step may have been placed anew.
    """


ENGINE_LOST = "engine-lost"
"""Cause of a step whose engine died, or was not there."""


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The step ended without an answer; `cause` says at which boundary. The driver decides what next."""

    at: float
    step_id: StepId
    engine_id: EngineId
    cause: str


@dataclass(frozen=True, slots=True)
class StepCancelled:
    """The program waits for this step no more: it goes on without, asks for another, or ends."""

    at: float
    step_id: StepId


@dataclass(frozen=True, slots=True)
class PredictionMade:
    """The answer to a `PredictRemaining`, as the trajectory stood after `steps_finished` steps."""

    at: float
    trajectory_id: TrajectoryId
    steps_finished: int
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """A context has arrived at its new engine, or will not; `seconds` and `tokens` of the move itself.

    `source_engine_id` tells this move from an earlier one to the same target, whose report may be under way still.
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
    """A trajectory asks for a tool or reward call."""

    at: float
    action: ActionRequest


@dataclass(frozen=True, slots=True)
class ActionFinished:
    """The action ended on its host; a tool that failed has finished too (`ok` is False).

    `ran` is False of one that was called off before it could start: it says nothing of how long such a tool takes.
    """

    at: float
    action_id: ActionId
    host_id: HostId
    run_s: float
    ok: bool = True
    ran: bool = True


@dataclass(frozen=True, slots=True)
class EngineJoined:
    """A warmed-up engine answers; it takes steps from now on."""

    at: float
    engine: EngineDescription


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine does not answer any more. `stranded`: its worker died with it, so that no step on it
    will ever report; otherwise each of its steps still ends in a `StepFailed`."""

    at: float
    engine_id: EngineId
    reason: str
    stranded: bool


@dataclass(frozen=True, slots=True)
class EngineDraining:
    """The engine finishes what it has and takes no new step."""

    at: float
    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class HostJoined:
    """A worker for actions is there."""

    at: float
    host: HostDescription


@dataclass(frozen=True, slots=True)
class HostLost:
    """A worker for actions is gone; its running actions will never report."""

    at: float
    host_id: HostId


@dataclass(frozen=True, slots=True)
class DegreesRequested:
    """A batch is about to start, and engines may change before it; a newer request supersedes an open one."""

    at: float
    request: DegreeRequest


@dataclass(frozen=True, slots=True)
class DegreesPlanned:
    """The answer to a `PlanDegrees`. Without a plan, `cause` says why: the engines stay as they are."""

    at: float
    request_id: int
    plan: TpDegreePlan | None
    cause: str = ""


Event = (
    TrajectorySubmitted
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
    | HostJoined
    | HostLost
    | DegreesRequested
    | DegreesPlanned
)
