"""Admission by a watermark on KV use: limits the live trajectories to those whose contexts fit into the engines.

Beyond the KV capacity every placement thrashes: contexts evict each other and are recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from heddle_dask.core.entities import Engine
from heddle_dask.core.view import Admit, ClusterView


@dataclass(slots=True)
class KvWatermark:
    """Raise the limit of live trajectories while KV is free, and cut it when KV is short, but keep engines full.

    Additive increase, multiplicative decrease (as in CONCUR, 2601.22705), after a slow start like TCP's (Jacobson
    1988): every result raises the limit until KV is short for the first time, later every round of results does. Live
    trajectories are never stopped: after a cut, new ones wait until enough have ended. If any engine does not report
    its KV capacity, there is no limit.

    KV is short if contexts take more than `high`, or if engines have evicted contexts that were needed again. Evictions
    precede preemptions by an engine, which first frees every block of an inactive context.

    Parameters
    ----------
    low, high
        Shares of the KV capacity, inactive contexts included: below `low` the limit rises, above `high` it falls.
    rise
        Increase of the limit per result at first, and per engine and round of results later. It applies only while the
        limit is reached and all live trajectories have a context: the memory of newly admitted ones is not known yet.
    cut
        Factor on the number of live trajectories that gives the limit after a cut.
    per_slot
        Minimum of live trajectories per slot, but no more than fill `low` with contexts of the present mean length:
        contexts grow, and a batch that begins with a trajectory per slot may later need a multiple of the memory.
    """

    low: float = 0.7
    high: float = 0.9
    rise: int = 1
    cut: float = 0.8
    per_slot: float = 0.25
    _limit: float = field(init=False, default=0.0)
    _was_short: bool = field(init=False, default=False)
    _evictions: int = field(init=False, default=0)
    _engines: Sequence[Engine] | None = field(init=False, default=None)
    _known: bool = field(init=False, default=False)
    _slots: int = field(init=False, default=0)
    _capacity_tokens: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if not (0 < self.low <= self.high) or not 0 < self.cut < 1 or self.rise < 1 or self.per_slot <= 0:
            raise ValueError("use 0 < low <= high, 0 < cut < 1, rise >= 1 and per_slot > 0")

    def admit(self, view: ClusterView) -> Sequence[Admit]:
        """Admit the oldest waiting trajectories up to the present limit."""
        engines = view.ready_engines
        if engines is not self._engines:
            self._sum_up(engines)
        if not self._known:
            return [Admit(trajectory) for trajectory in view.unadmitted]
        if not view.alive:
            self._evictions = view.evictions  # ignore evictions of a batch that has ended
        used = sum([engine.resident_tokens for engine in engines])
        residents = sum([len(engine.residents) for engine in engines])
        if used > self.high * self._capacity_tokens or view.evictions > self._evictions:
            self._limit = self.cut * view.alive
            self._was_short = True
        elif used < self.low * self._capacity_tokens and int(self._limit) <= view.alive <= residents:
            self._limit += self.rise * (len(engines) / view.alive if self._was_short else 1)
        self._evictions = view.evictions
        self._limit = max(self._limit, self._floor(used, residents), float(len(engines)), 1.0)
        room = max(0, int(self._limit) - view.alive)
        return [Admit(trajectory) for trajectory in islice(view.unadmitted, room)]

    def _floor(self, used: int, residents: int) -> float:
        """Minimum of the limit that keeps engines full: `per_slot` of their slots, or the contexts that fill `low`."""
        slots = self.per_slot * self._slots
        return min(slots, self.low * self._capacity_tokens * residents / used) if used else slots

    def _sum_up(self, engines: Sequence[Engine]) -> None:
        """Sum slots and capacities again if the list of ready engines has changed."""
        self._engines = engines
        self._known = all(engine.spec.kv_capacity_tokens > 0 for engine in engines)
        self._slots = sum(engine.spec.slots for engine in engines)
        self._capacity_tokens = sum(engine.spec.kv_capacity_tokens for engine in engines)
