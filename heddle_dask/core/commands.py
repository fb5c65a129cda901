"""Commands, named in the imperative. The body carries out every command unchanged."""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core.ids import ActionId, EngineId, HostId, StepId, TrajectoryId
from heddle_dask.core.priority import Priority


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
    """

    step_id: StepId
    engine_id: EngineId
    priority: Priority
    order: int
    source_engine_id: EngineId | None = None
    bypass_queue: bool = False


@dataclass(frozen=True, slots=True)
class GiveUpStep:
    """Tell the driver that this step is not retried: its engine died too often, or no engine takes its context."""

    step_id: StepId
    cause: str


PREEMPTED_FOR = "preempted for "
"""What the reason of an `AbortStep` begins with when the step is preempted; the id of the other trajectory follows."""


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
    """Run the action on this host with this many CPUs, now."""

    action_id: ActionId
    host_id: HostId
    cpus: int


@dataclass(frozen=True, slots=True)
class GiveUpAction:
    """Tell the driver that this action is not retried: its host died too often, or no host has enough CPUs."""

    action_id: ActionId
    cause: str


@dataclass(frozen=True, slots=True)
class AbortAction:
    """Stop a running action of an ended trajectory. Its CPUs become free when the host reports its end."""

    action_id: ActionId
    host_id: HostId


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


Command = (
    AdmitTrajectory
    | StartStep
    | GiveUpStep
    | AbortStep
    | PredictRemaining
    | MoveContext
    | DropContext
    | RunAction
    | GiveUpAction
    | AbortAction
    | ReleaseEngine
    | ReleaseHost
    | PlanDegrees
    | DeployEngines
)
