"""Commands, named in the imperative. The body carries out every command unchanged."""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core.ids import ActionId, EngineId, HostId, PolicyVersion, StepId, TrajectoryId
from heddle_dask.core.nouns import ActionWaits, Priority
from heddle_dask.core.resources import CPUS, Resources

NO_WAITS = ActionWaits()


@dataclass(frozen=True, slots=True)
class AdmitTrajectory:
    """Start the trajectory's program.

    Attributes
    ----------
    engine_id
        The engine with a reservation for the trajectory until its first step is placed; None without a reservation.
    """

    trajectory_id: TrajectoryId
    engine_id: EngineId | None = None


@dataclass(frozen=True, slots=True)
class StartStep:
    """Queue the step at the engine; it runs when a slot is free, larger `priority` first.

    Attributes
    ----------
    priority
        Larger runs first. Converted to the signs of Dask and vLLM at their borders.
    order
        Running number; breaks ties of `priority`, smaller first.
    source_engine_id
        The engine that last had the trajectory's context and KV cache, if any.
    bypass_queue
        Send the step to the engine now, although no slot is free. A running step is being preempted for it, and the
        engine must have this step before the slot becomes free.
    prefill_only
        Stop after the first token: the step is computed here up to its prompt, and goes on elsewhere. It comes back as
        aborted, with this token.
    """

    step_id: StepId
    engine_id: EngineId
    priority: Priority
    order: int
    source_engine_id: EngineId | None = None
    bypass_queue: bool = False
    prefill_only: bool = False


@dataclass(frozen=True, slots=True)
class GiveUpStep:
    """Tell the driver that this step is not retried: its engine died too often, or no engine takes its context."""

    step_id: StepId
    cause: str


PREEMPTED_FOR = "preempted for "
"""What the reason of an `AbortStep` begins with when the step is preempted; the id of the other trajectory follows."""

TAKEN_BY = "taken by the idle "
"""The same where an idle engine takes the step; the id of the engine follows."""

RECALLED = "another run joins"
REQUEUED = ("its engine ", TAKEN_BY, RECALLED)
"""What the reason begins with when the step waits again for no decision of the strategy."""


@dataclass(frozen=True, slots=True)
class AbortStep:
    """Stop a queued or running step; its tokens so far come back in `StepFinished`."""

    step_id: StepId
    engine_id: EngineId
    reason: str


@dataclass(frozen=True, slots=True)
class PredictRemaining:
    """Predict the remaining work of this trajectory; the answer is a `PredictionMade`."""

    trajectory_id: TrajectoryId


@dataclass(frozen=True, slots=True)
class MoveContext:
    """Move the trajectory's context and KV cache to another engine; the answer is a `MoveEnded`.

    Attributes
    ----------
    kind
        ``"transfer"``: copy the KV cache; ``"recompute"``: let the target prefill the context.
    """

    trajectory_id: TrajectoryId
    source_engine_id: EngineId
    target_engine_id: EngineId
    kind: str


@dataclass(frozen=True, slots=True)
class DropContext:
    """Drop the copy of the trajectory's context at this engine: no step will use it.

    The trajectory has ended, its context has moved away, or the context arrived too late. An engine without the context
    ignores the command.
    """

    trajectory_id: TrajectoryId
    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class RunAction:
    """Run the action on this host with these resources, now.

    Attributes
    ----------
    first_gpu, gpus
        The GPUs that it uses: `gpus` of them from `first_gpu` on, counted on its host; 0 GPUs: none. An action with a
        service runs on the copy that is resident on exactly this chunk, together with other requests of that copy.
    reach_cpus
        CPUs of its host that it may use in all, its own among them: the others while those that have them leave them
        idle. 0: its own alone.
    nice
        Where it may use those of others, the nice value of all its processes (setpriority(2)), 1 to 19, or `IDLE_NICE`
        for the scheduling class that runs when nothing else does (``SCHED_IDLE``).
    """

    action_id: ActionId
    host_id: HostId
    resources: Resources
    waits: ActionWaits = NO_WAITS
    first_gpu: int = 0
    gpus: int = 0
    reach_cpus: int = 0
    nice: int = 0

    @property
    def cpus(self) -> int:
        return self.resources[CPUS]


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Send a `TimeReached` at this time (seconds since the session started), or at once where it is over."""

    at_s: float


@dataclass(frozen=True, slots=True)
class ReportApi:
    """Tell the user that the circuit breaker of an API has opened or closed.

    Attributes
    ----------
    state
        A `BreakerState`: ``"open"`` or ``"closed"``.
    until_s
        When an open breaker lets a call through (seconds since the session started); 0 for a closed one.
    cause
        Why it opened, in one line.
    """

    api: str
    state: str
    until_s: float = 0.0
    cause: str = ""


@dataclass(frozen=True, slots=True)
class GiveUpAction:
    """Tell the driver that this action is not retried: its host died too often, or no host has enough resources."""

    action_id: ActionId
    cause: str


@dataclass(frozen=True, slots=True)
class AbortAction:
    """Stop a running action of an ended trajectory. Its resources become free when the host reports its end."""

    action_id: ActionId
    host_id: HostId


@dataclass(frozen=True, slots=True)
class LoadService:
    """Make a copy of the service resident on `gpus` GPUs from `first_gpu` on; the answer is a `ServiceLoaded`.

    The GPUs have memory for it: what had to leave them has reported its eviction. Other copies may run there meanwhile.

    Attributes
    ----------
    cold
        Host memory has no copy for this number of GPUs: load the service from its files, and keep a copy in host memory
        unless `keep` is False.
    keep
        Whether the host's budget has room for the copy.
    """

    host_id: HostId
    service: str
    first_gpu: int
    gpus: int
    cold: bool = False
    keep: bool = True


@dataclass(frozen=True, slots=True)
class EvictService:
    """Free the GPU memory of an idle resident copy and write nothing back; the answer is a `ServiceEvicted`."""

    host_id: HostId
    service: str
    first_gpu: int
    gpus: int


@dataclass(frozen=True, slots=True)
class DropServiceCopy:
    """Free the copy in host memory of this service for this number of GPUs: the budget is needed for another.

    No answer. Copies that are resident on GPUs stay.
    """

    host_id: HostId
    service: str
    gpus: int


@dataclass(frozen=True, slots=True)
class CloseSandbox:
    """End what runs in the sandbox on this host and delete it. A host without it ignores the command."""

    host_id: HostId
    sandbox: str


@dataclass(frozen=True, slots=True)
class ReleaseEngine:
    """A draining engine is empty: nothing is lost when it ends. Issued once."""

    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class ReleaseHost:
    """A draining host runs no action any more: nothing is lost when it ends. Issued once."""

    host_id: HostId


@dataclass(frozen=True, slots=True)
class PlanDegrees:
    """Search TP degrees for the batch of this request, outside the event loop; the answer is a `DegreesPlanned`."""

    request_id: int


@dataclass(frozen=True, slots=True)
class DeployEngines:
    """Deploy exactly these engines, one for each TP degree.

    Engines that match are kept. The others are stopped (`EngineLost`), and new ones join (`EngineJoined`).
    """

    request_id: int
    tp_degrees: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FetchWeights:
    """Bring published weights to the engine's machine and verify them, while it generates; answer: `WeightsFetched`.

    A newer `FetchWeights` for the same engine replaces one that is under way.
    """

    engine_id: EngineId
    version: PolicyVersion
    uri: str


@dataclass(frozen=True, slots=True)
class InstallWeights:
    """Pause the engine, load the fetched weights, resume it; the answer is a `WeightsInstalled`.

    Attributes
    ----------
    keep_kv
        Steps in flight and cached prefixes keep the KV computed under the old weights; else it is recomputed.
    """

    engine_id: EngineId
    version: PolicyVersion
    keep_kv: bool = False


@dataclass(frozen=True, slots=True)
class CancelTrajectory:
    """Stop the trajectory's program, its LLM step and its actions; the driver reports its end.

    Attributes
    ----------
    cause
        `staleness.STALE` or `staleness.REDUNDANT`.
    """

    trajectory_id: TrajectoryId
    cause: str


Command = (
    AdmitTrajectory
    | StartStep
    | GiveUpStep
    | AbortStep
    | PredictRemaining
    | MoveContext
    | DropContext
    | RunAction
    | WakeUp
    | ReportApi
    | GiveUpAction
    | AbortAction
    | LoadService
    | EvictService
    | DropServiceCopy
    | CloseSandbox
    | ReleaseEngine
    | ReleaseHost
    | PlanDegrees
    | DeployEngines
    | FetchWeights
    | InstallWeights
    | CancelTrajectory
)
