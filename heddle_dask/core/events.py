"""Events, named in the past tense. Every event carries `at`: seconds since the session started.

Time is data: the body reads the clock once per event, and `at` never decreases.
"""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core.ids import (
    FIRST_RUN,
    ActionId,
    EngineId,
    GroupId,
    HostId,
    PolicyVersion,
    RunId,
    StepId,
    TrajectoryId,
)
from heddle_dask.core.nouns import (
    ActionRequest,
    DegreeRequest,
    EngineDescription,
    HostDescription,
    Prediction,
    StepRequest,
    TpDegreePlan,
    TrajectorySpec,
)
from heddle_dask.core.resources import ApiQuota, ModelService, PoolMaximum
from heddle_dask.core.run_description import RunDescription


@dataclass(frozen=True, slots=True)
class Stamped:
    """What every event has: its time, in seconds since the session started; it never decreases."""

    at: float


@dataclass(frozen=True, slots=True)
class RunStarted(Stamped):
    """A run joins the controller. The first run may be described too, before its first trajectory."""

    run: RunDescription


@dataclass(frozen=True, slots=True)
class RunEnded(Stamped):
    """A run leaves: it has come to its end, or its driver is gone. Its trajectories end with it."""

    run_id: RunId


@dataclass(frozen=True, slots=True)
class TrajectorySubmitted(Stamped):
    """The driver submitted a trajectory, which waits for admission."""

    trajectory: TrajectorySpec


@dataclass(frozen=True, slots=True)
class TrajectoryForked(Stamped):
    """The program of `parent` went on in a second context, which is a trajectory of its own from here on.

    It does not wait for admission: its parent is admitted, and may wait for it.
    """

    trajectory: TrajectorySpec
    parent: TrajectoryId


@dataclass(frozen=True, slots=True)
class ProgramEnded(Stamped):
    """The program of a trajectory has returned, and its reward is still to come: it holds no engine any more.

    The actions of the reward follow; a `TrajectoryEnded` ends them.
    """

    trajectory_id: TrajectoryId


@dataclass(frozen=True, slots=True)
class TrajectoryEnded(Stamped):
    """The program of a trajectory returned or failed, or the driver gave it up."""

    trajectory_id: TrajectoryId
    status: str


@dataclass(frozen=True, slots=True)
class StepRequested(Stamped):
    """A trajectory requests an LLM step, or requests one again, whole or its rest (`attempt` > 0)."""

    step: StepRequest


@dataclass(frozen=True, slots=True)
class StepStarted(Stamped):
    """The step has started on its engine.

    Simulated, it holds a slot. Live, its worker has sent it to the engine's process, where it holds a slot or waits in
    the engine's own queue; the engine does not report which, so `Engine.running` and `Engine.ahead` are an estimate.
    """

    step_id: StepId
    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class StepFinished(Stamped):
    """The engine returned a result; an aborted request returns the tokens it has."""

    step_id: StepId
    engine_id: EngineId
    new_tokens: int
    cached_tokens: int
    finish_reason: str
    policy_version: int = 0


ENGINE_LOST = "engine-lost"
"""Cause of a `StepFailed`: the engine died or did not exist."""


@dataclass(frozen=True, slots=True)
class StepFailed(Stamped):
    """The step ended without a result; `cause` names the boundary. The driver decides how to go on."""

    step_id: StepId
    engine_id: EngineId
    cause: str


@dataclass(frozen=True, slots=True)
class StepCancelled(Stamped):
    """The program no longer waits for this step: it goes on without it, requests another, or ends."""

    step_id: StepId


@dataclass(frozen=True, slots=True)
class PredictionMade(Stamped):
    """The answer to a `PredictRemaining`, for the trajectory after `steps_finished` steps."""

    trajectory_id: TrajectoryId
    steps_finished: int
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class MoveEnded(Stamped):
    """A move of a context has succeeded or failed; `seconds` and `tokens` are those of the move.

    `source_engine_id` distinguishes this move from an earlier one to the same target whose report may still be in
    transit.
    """

    trajectory_id: TrajectoryId
    target_engine_id: EngineId
    ok: bool
    kind: str
    seconds: float
    tokens: int = 0
    cause: str = ""
    source_engine_id: EngineId | None = None


@dataclass(frozen=True, slots=True)
class PoolsDeclared(Stamped):
    """A run declares quotas of APIs, model services and largest workers. A known name is declared anew."""

    quotas: tuple[ApiQuota, ...] = ()
    services: tuple[ModelService, ...] = ()
    pool_maxima: tuple[PoolMaximum, ...] = ()


@dataclass(frozen=True, slots=True)
class TimeReached(Stamped):
    """The answer to a `WakeUp`."""


@dataclass(frozen=True, slots=True)
class ActionRequested(Stamped):
    """A trajectory requests a tool or reward call."""

    action: ActionRequest


@dataclass(frozen=True, slots=True)
class ActionFinished(Stamped):
    """The action ended on its host; also if the tool failed (`ok` is False).

    `ran` is False for an action that was cancelled before it started: its seconds do not count as a tool time.

    Attributes
    ----------
    cause
        What ended it where it is not ok: ``"raised"``, ``"timeout"``, ``"memory"``, ``"rate-limited"``, …; empty: ok.
    retry_after_s
        Seconds for which an API asks to be left alone; None: it does not say.
    used_tokens, used_cost
        What its call of an API has used; None: it does not say.
    """

    action_id: ActionId
    host_id: HostId
    run_s: float
    ok: bool = True
    ran: bool = True
    cause: str = ""
    retry_after_s: float | None = None
    used_tokens: int | None = None
    used_cost: float | None = None


@dataclass(frozen=True, slots=True)
class ActionCancelled(Stamped):
    """The program no longer waits for this action."""

    action_id: ActionId


@dataclass(frozen=True, slots=True)
class SandboxClosed(Stamped):
    """A program needs its sandbox no longer. Those that it leaves open are closed when its trajectory ends."""

    sandbox: str


@dataclass(frozen=True, slots=True)
class EngineJoined(Stamped):
    """A warmed-up engine has joined and takes steps."""

    engine: EngineDescription


@dataclass(frozen=True, slots=True)
class EngineLost(Stamped):
    """The engine is lost.

    `stranded`: its worker is lost too, so none of its steps will report; otherwise each of its steps still ends in a
    `StepFailed`.
    """

    engine_id: EngineId
    reason: str
    stranded: bool


@dataclass(frozen=True, slots=True)
class EngineDraining(Stamped):
    """The engine is to be left: it takes no new step, and what it has finishes or moves away.

    Attributes
    ----------
    ends_at
        When it will end, in seconds since the session started; None when that is not known.
    """

    engine_id: EngineId
    ends_at: float | None = None


@dataclass(frozen=True, slots=True)
class EngineExpiring(Stamped):
    """A draining engine ends in a moment: its steps must stop now, for their tokens to come back."""

    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class HostJoined(Stamped):
    """A worker for actions has joined."""

    host: HostDescription


@dataclass(frozen=True, slots=True)
class HostDraining(Stamped):
    """The worker for actions is to be left: it takes no new action, and its running ones may finish."""

    host_id: HostId


@dataclass(frozen=True, slots=True)
class HostLost(Stamped):
    """A worker for actions is lost; its running actions will never report."""

    host_id: HostId


@dataclass(frozen=True, slots=True)
class ServiceLoaded(Stamped):
    """The answer to a `LoadService`: the copy is resident, or (`ok` is False) nothing of it is left on these GPUs.

    Attributes
    ----------
    first_gpu, gpus
        The chunk as in the command.
    cause
        Why it failed, one line; empty: it did not.
    """

    host_id: HostId
    service: str
    first_gpu: int
    gpus: int
    ok: bool = True
    seconds: float = 0.0
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ServiceEvicted(Stamped):
    """The answer to an `EvictService`, also for a copy that was gone before: its memory on the GPUs is free."""

    host_id: HostId
    service: str
    first_gpu: int
    gpus: int


@dataclass(frozen=True, slots=True)
class ServiceLost(Stamped):
    """A resident copy is gone without an order, such as by the death of its process; its host lives.

    Each of its running requests still reports by an `ActionFinished` with the cause `SERVICE_LOST`. A copy that dies
    while it is loaded is a `ServiceLoaded` that is not ok, and reports nothing here.
    """

    host_id: HostId
    service: str
    first_gpu: int
    gpus: int
    cause: str = ""


SERVICE_LOST = "service-lost"
"""Cause of an `ActionFinished`: what ran it died, the copy of its model service or the server of its process."""


@dataclass(frozen=True, slots=True)
class DegreesRequested(Stamped):
    """A batch is about to start, and engines may change before; a newer request supersedes an open one."""

    request: DegreeRequest


@dataclass(frozen=True, slots=True)
class DegreesPlanned(Stamped):
    """The answer to a `PlanDegrees`. Without a plan the engines stay as they are, and `cause` says why."""

    request_id: int
    plan: TpDegreePlan | None
    cause: str = ""


@dataclass(frozen=True, slots=True)
class OptimizerStepEnded(Stamped):
    """The trainer of a run has finished an optimiser step: n is `version.number`, and what is too old now is cancelled.

    Its weights are not published yet. The first event of a run names the version with which it begins.
    """

    run_id: RunId
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class WeightsPublished(Stamped):
    """Weights are complete in the weight store at `uri` (their manifest): engines may fetch them.

    Attributes
    ----------
    run_id
        The run that trains them: its `WeightUpdatePolicy` says how engines go over to them.
    """

    version: PolicyVersion
    uri: str
    nbytes: int = 0
    run_id: RunId = FIRST_RUN


@dataclass(frozen=True, slots=True)
class WeightsFetched(Stamped):
    """The answer to a `FetchWeights`: they are verified and at hand, or were refused or not reached (`cause`)."""

    engine_id: EngineId
    version: PolicyVersion
    cause: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SwitchRequested(Stamped):
    """The training loop wants engines to go over to this version, or a newer one, as soon as they have fetched it."""

    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class WeightsInstalled(Stamped):
    """The answer to an `InstallWeights`: the engine samples with them, or keeps its old ones (`cause`).

    Attributes
    ----------
    paused_s
        Seconds during which the engine generated nothing.
    """

    engine_id: EngineId
    version: PolicyVersion
    paused_s: float = 0.0
    cause: str = ""


@dataclass(frozen=True, slots=True)
class GroupEnded(Stamped):
    """A group of a run has left the driver, or has left the sample buffer without being trained on.

    Its trajectories that have ended count no longer as running. A group may be reported several times.

    Attributes
    ----------
    accepted
        Trajectories that it is worth in a batch: those of a whole group if it went into the sample buffer, also where a
        member has failed; 0: it was dropped; below 0: so many that were in the buffer were dropped there, for example
        because they were too old when a batch was formed.
    """

    run_id: RunId
    group_id: GroupId
    accepted: int


@dataclass(frozen=True, slots=True)
class TrajectoryRedundant(Stamped):
    """The driver has enough without this trajectory: it is cancelled."""

    trajectory_id: TrajectoryId


Event = (
    RunStarted
    | RunEnded
    | TrajectorySubmitted
    | TrajectoryForked
    | ProgramEnded
    | TrajectoryEnded
    | StepRequested
    | StepStarted
    | StepFinished
    | StepFailed
    | StepCancelled
    | PredictionMade
    | MoveEnded
    | PoolsDeclared
    | TimeReached
    | ActionRequested
    | ActionFinished
    | ActionCancelled
    | SandboxClosed
    | EngineJoined
    | EngineLost
    | EngineDraining
    | EngineExpiring
    | HostJoined
    | HostDraining
    | HostLost
    | ServiceLoaded
    | ServiceEvicted
    | ServiceLost
    | DegreesRequested
    | DegreesPlanned
    | OptimizerStepEnded
    | WeightsPublished
    | WeightsFetched
    | SwitchRequested
    | WeightsInstalled
    | GroupEnded
    | TrajectoryRedundant
)
