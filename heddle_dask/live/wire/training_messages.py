"""Messages about training between the driver and the scheduler plugin: versions, groups, cancellations, credits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from heddle_dask.core.ids import EngineId, GroupId, PolicyVersion, TrajectoryId
from heddle_dask.live.wire.codec import Message, Request, WireValue

# -- driver to scheduler ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OptimizerStepReport(Message):
    """The trainer has finished an optimiser step; the first report of a session names the version it begins with."""

    op: ClassVar[str] = "heddle-optimizer-step"

    session: str
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class WeightsPublishedReport(Message):
    """Weights are complete in the weight store; `uri` is that of their manifest."""

    op: ClassVar[str] = "heddle-weights-published"

    session: str
    version: PolicyVersion
    uri: str
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class SwitchReport(Message):
    """Engines are to go over to this version, or a newer one, as soon as they have fetched it."""

    op: ClassVar[str] = "heddle-switch-weights"

    session: str
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class GroupEndedReport(Message):
    """A group has left the driver, or the buffer (`accepted` below 0): as `core.events.GroupEnded`."""

    op: ClassVar[str] = "heddle-group-ended"

    session: str
    group_id: GroupId
    accepted: int


@dataclass(frozen=True, slots=True)
class TrajectoryRedundantReport(Message):
    """The driver has enough without this trajectory."""

    op: ClassVar[str] = "heddle-trajectory-redundant"

    session: str
    trajectory_id: TrajectoryId


@dataclass(frozen=True, slots=True)
class TrainingFiguresReport(Message):
    """Figures of a training step for those who watch the cluster, by the names of ``metrics.jsonl``."""

    op: ClassVar[str] = "heddle-training-figures"

    session: str
    step: int
    figures: Mapping[str, float]


# -- scheduler to driver ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrajectoryCancelledNotice(Message):
    """The controller wants this trajectory to stop: the driver ends its program, its LLM step and its actions.

    Attributes
    ----------
    cause
        `core.run_description.STALE` or `REDUNDANT`.
    """

    op: ClassVar[str] = "heddle-trajectory-cancelled-notice"

    trajectory_id: TrajectoryId
    cause: str


@dataclass(frozen=True, slots=True)
class EngineUpdatedNotice(Message):
    """An engine samples with this version from now on, or has failed to fetch or install it for good (`cause`)."""

    op: ClassVar[str] = "heddle-engine-updated-notice"

    engine_id: EngineId
    version: PolicyVersion
    paused_s: float = 0.0
    cause: str = ""


@dataclass(frozen=True, slots=True)
class EngineWeightState(WireValue):
    """The weights of one engine.

    Attributes
    ----------
    installed, fetched
        The version that it samples with, and the one that it has at hand or under way; None: none beside it.
    state
        A `core.transitions.WeightsState` by value.
    cause
        Why the latest fetch or installation failed; empty: it did not.
    """

    engine_id: EngineId
    installed: PolicyVersion
    fetched: PolicyVersion | None
    state: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class WeightStatus(Message):
    """Versions of the engines, and the credits of a session.

    Attributes
    ----------
    engines
        Engines that take steps, or will once they have newer weights; in the order of joining.
    published, wanted
        The newest published version, and the one that engines are to go over to; None: none.
    bounded
        Whether the session has a bound on staleness; without one the numbers below are 0.
    credits, accepted, running
        As in `StalenessBound.credits`, at n = `optimizer_steps`.
    """

    op: ClassVar[str] = "heddle_weight_status"

    engines: tuple[EngineWeightState, ...] = ()
    published: PolicyVersion | None = None
    wanted: PolicyVersion | None = None
    bounded: bool = False
    credits: int = 0
    accepted: int = 0
    running: int = 0
    optimizer_steps: int = 0


@dataclass(frozen=True, slots=True)
class GetWeightStatus(Request[WeightStatus]):
    """Which weights do the engines have, and how many trajectories may start?"""

    op: ClassVar[str] = "heddle_get_weight_status"

    session: str
