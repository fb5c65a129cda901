"""Admission by KV pressure: as many trajectories alive as their contexts fit into the engines.

Beyond the KV capacity every placement thrashes: contexts throw each other out, and what was computed is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.view import ClusterView


@dataclass(slots=True)
class KvPressure:
    """Raise the number alive slowly while KV is free, cut it when KV is short, never below what keeps engines full.

    Additive increase, multiplicative decrease (as CONCUR, 2601.22705). Nothing is taken back: a cut holds new
    trajectories until enough have ended. Engines that do not say their KV capacity bound nothing.

    Parameters
    ----------
    low, high
        Shares of the KV capacity, contexts at rest included: below `low` the limit rises, above `high` it falls.
    rise
        Trajectories that one decision adds to the limit, when the limit binds and all that are alive hold a context:
        those that were just admitted have not shown yet what they take.
    cut
        Factor of a fall, from the number alive.
    per_slot
        The least alive per slot.
    """

    low: float = 0.7
    high: float = 0.9
    rise: int = 1
    cut: float = 0.8
    per_slot: float = 1.0
    _limit: float = 0.0
    _engines: Sequence[Engine] | None = field(init=False, default=None)
    _known: bool = field(init=False, default=False)
    _slots: int = field(init=False, default=0)
    _capacity_tokens: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if not (0 < self.low <= self.high) or not 0 < self.cut < 1 or self.rise < 1 or self.per_slot <= 0:
            raise ValueError("use 0 < low <= high, 0 < cut < 1, rise >= 1 and per_slot > 0")

    def admit(self, view: ClusterView) -> Sequence[Trajectory]:
        """The oldest that wait, up to the limit of now."""
        engines = view.ready_engines
        if engines is not self._engines:
            self._sum_up(engines)
        if not self._known:
            return list(view.unadmitted)
        floor, capacity = self.per_slot * self._slots, self._capacity_tokens
        used = sum([engine.resident_tokens for engine in engines])
        if capacity and used > self.high * capacity:
            self._limit = self.cut * view.alive
        elif used < self.low * capacity and int(self._limit) <= view.alive <= self._residents(engines):
            self._limit += self.rise
        self._limit = max(self._limit, floor, 1.0)
        return list(islice(view.unadmitted, max(0, int(self._limit) - view.alive)))

    def _residents(self, engines: Sequence[Engine]) -> int:
        return sum([len(engine.residents) for engine in engines])

    def _sum_up(self, engines: Sequence[Engine]) -> None:
        """The ready engines have changed: it is another list then."""
        self._engines = engines
        self._known = all(engine.spec.kv_capacity_tokens > 0 for engine in engines)
        self._slots = sum(engine.spec.slots for engine in engines)
        self._capacity_tokens = sum(engine.spec.kv_capacity_tokens for engine in engines)
