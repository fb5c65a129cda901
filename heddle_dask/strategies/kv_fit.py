"""Admission by KV memory: as many trajectories alive as engines have room for, the longest predicted first.

A trajectory that comes back from its tool to find its context thrown out pays for the whole of it again. Where the
contexts of all that are alive do not fit, that happens at nearly every step, and neither order nor placement repairs it
(CONCUR, 2601.22705; ThunderAgent, 2602.13692). So a trajectory starts when an engine has room for its context as it is
expected to become, and keeps that room until it ends. Those that wait are bound to no engine: the next one with room
takes the longest, which is Graham's list schedule.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from heddle_dask.core.ids import TrajectoryId
from heddle_dask.core.state import Engine, Trajectory
from heddle_dask.core.transitions import TrajectoryState
from heddle_dask.core.view import ClusterView
from heddle_dask.strategies.room import GROWTH, expected_context_tokens, reserved_tokens


@dataclass(slots=True)
class KvFit:
    """Admit the longest while an engine has room for it and not too many queue; one per engine in any case.

    Parameters
    ----------
    fill
        Share of each engine's KV memory that may be promised. Engines that do not say how much they have bound nothing.
    growth
        Context tokens that a predicted token stands for (`room`).
    per_slot
        Most trajectories that generate or queue, per slot. More than 1: a free slot finds a step at once, and the
        predictor sees more trajectories begin.
    quantile
        Which prediction is *longest*.
    """

    fill: float = 0.95
    growth: float = GROWTH
    per_slot: float = 2.5
    quantile: Literal["median", "q90"] = "q90"
    # Those that wait, longest first, with stale entries; those admitted that have no engine yet.
    _line: list[tuple[float, int, Trajectory]] = field(init=False, default_factory=list)
    _coming: dict[TrajectoryId, Trajectory] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not self.fill > 0 or self.growth < 0 or self.per_slot <= 0:
            raise ValueError("use fill and per_slot above 0 and growth of at least 0")
        if self.quantile not in ("median", "q90"):
            raise ValueError(f"quantile={self.quantile}: use median or q90")

    def rank(self, trajectory: Trajectory) -> None:
        """It may be admitted from now on; once more when its prediction is new."""
        heapq.heappush(self._line, (-self._length(trajectory), trajectory.number, trajectory))

    def _length(self, trajectory: Trajectory) -> float:
        if self.quantile == "q90":
            return trajectory.predicted_tokens_q90 or 0.0
        return trajectory.predicted_tokens or 0.0

    def admit(self, view: ClusterView) -> Sequence[Trajectory]:
        """The longest that have room. O(engines) when somebody waits, O(1) else."""
        first = self._first()
        engines = view.ready_engines
        if first is None or not engines:
            return []
        self._forget_arrived()
        rooms = self._rooms(engines)
        queued = sum(len(engine.inflight) for engine in engines) + len(self._coming)
        most = self.per_slot * sum(engine.spec.slots for engine in engines)
        admitted: list[Trajectory] = []
        while first is not None:
            need = expected_context_tokens(first, self.growth)
            unused = view.alive + len(admitted) < len(engines)
            if not unused and (need > -rooms[0] or queued + len(admitted) >= most):
                break
            heapq.heappop(self._line)
            heapq.heapreplace(rooms, rooms[0] + need)
            self._coming[first.trajectory_id] = first
            admitted.append(first)
            first = self._first()
        return admitted

    def _first(self) -> Trajectory | None:
        """The longest that waits; entries of those that do not wait, or have a newer one, are dropped."""
        while self._line:
            length, _, trajectory = self._line[0]
            waits = (
                trajectory.state is TrajectoryState.SUBMITTED and trajectory.trajectory_id not in self._coming
            )
            if waits and -length == self._length(trajectory):
                return trajectory
            heapq.heappop(self._line)
        return None

    def _forget_arrived(self) -> None:
        ended = TrajectoryState.ENDED
        arrived = [i for i, t in self._coming.items() if t.home is not None or t.state is ended]
        for name in arrived:
            del self._coming[name]

    def _rooms(self, engines: Sequence[Engine]) -> list[float]:
        """Tokens free on each engine, negated, as a heap; who is coming goes where most is free, as placement does."""
        rooms = [
            reserved_tokens(engine, self.growth) - self.fill * engine.spec.kv_capacity_tokens
            if engine.spec.kv_capacity_tokens > 0
            else -math.inf
            for engine in engines
        ]
        heapq.heapify(rooms)
        for trajectory in self._coming.values():
            heapq.heapreplace(rooms, rooms[0] + expected_context_tokens(trajectory, self.growth))
        return rooms
