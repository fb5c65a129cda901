"""Messages about training between the driver and the scheduler plugin: figures, versions of the engines, credits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from heddle_dask.core.ids import EngineId, PolicyVersion
from heddle_dask.live.wire.codec import Message, Request, WireValue


@dataclass(frozen=True, slots=True)
class TrainingFiguresReport(Message):
    """Figures of a training step for those who watch the cluster, by the names of ``metrics.jsonl``."""

    session: str
    step: int
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EngineWeightState(WireValue):
    """The weights of one engine."""

    engine_id: EngineId
    # `installed`, `fetched`: the version that it samples with, and the one that it has at hand or under way; None:
    # none beside it.
    installed: PolicyVersion
    fetched: PolicyVersion | None
    state: str  # a `core.transitions.WeightsState` by value
    cause: str = ""  # why the latest fetch or installation failed; empty: it did not


@dataclass(frozen=True, slots=True)
class WeightStatus(Message):
    """Versions of the engines, and the credits of a session."""

    # Engines that take steps, or will once they have newer weights; in the order of joining.
    engines: tuple[EngineWeightState, ...] = ()
    # `published`, `wanted`: the newest published version, and the one that engines are to go over to; None: none.
    published: PolicyVersion | None = None
    wanted: PolicyVersion | None = None
    bounded: bool = False  # whether the session has a bound on staleness; without one the numbers below are 0
    # `credits`, `accepted`, `running`: as in `StalenessBound.credits`, at n = `optimizer_steps`.
    credits: int = 0
    accepted: int = 0
    running: int = 0
    optimizer_steps: int = 0


@dataclass(frozen=True, slots=True)
class GetWeightStatus(Request[WeightStatus]):
    """Which weights do the engines have, and how many trajectories may start?"""

    session: str
