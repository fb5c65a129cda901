"""Admission by a watermark on KV use: as many trajectories alive as their contexts fit into the engines.

Beyond the KV capacity every placement thrashes: contexts throw each other out, and what was computed is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from heddle_dask.core.entities import Engine
from heddle_dask.core.view import Admit, ClusterView


@dataclass(slots=True)
class KvWatermark:
    """Raise the number alive slowly while KV is free, cut it when KV is short, never below what keeps engines full.

    Additive increase, multiplicative decrease (as CONCUR, 2601.22705), after a start like TCP's (Jacobson 1988): every
    answer raises the limit until KV was short for the first time, after that every round of answers does. Nothing is
    taken back: a cut holds new trajectories until enough have ended. Engines that do not say their KV capacity bound
    nothing.

    KV is short where contexts take more than `high`, and where engines have thrown out what they are asked for again.
    The latter comes before an engine preempts: it takes back every block of a context at rest first.

    Parameters
    ----------
    low, high
        Shares of the KV capacity, contexts at rest included: below `low` the limit rises, above `high` it falls.
    rise
        Trajectories that an answer adds to the limit at first, and later one from everybody alive adds per engine;
        when the limit binds and all that are alive hold a context: those that were just admitted have not shown yet
        what they take.
    cut
        Factor of a fall, from the number alive.
    per_slot
        The least alive per slot, as far as contexts of the mean length of now fill `low` and no more: contexts grow,
        and a batch that begins with a trajectory for every slot may need a multiple of the memory in its middle.
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
        """The oldest that wait, up to the limit of now."""
        engines = view.ready_engines
        if engines is not self._engines:
            self._sum_up(engines)
        if not self._known:
            return [Admit(trajectory) for trajectory in view.unadmitted]
        if not view.alive:
            self._evictions = view.evictions  # those of a batch that has ended
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
        """What keeps engines full: a share of their slots, or as many contexts as fill them to `low`."""
        slots = self.per_slot * self._slots
        return min(slots, self.low * self._capacity_tokens * residents / used) if used else slots

    def _sum_up(self, engines: Sequence[Engine]) -> None:
        """The ready engines have changed: it is another list then."""
        self._engines = engines
        self._known = all(engine.spec.kv_capacity_tokens > 0 for engine in engines)
        self._slots = sum(engine.spec.slots for engine in engines)
        self._capacity_tokens = sum(engine.spec.kv_capacity_tokens for engine in engines)
