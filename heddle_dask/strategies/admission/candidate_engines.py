"""Which engines an admission asks: those that may take one. Who took nobody is closed until that may have changed."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from heddle_dask.core.entities import Engine
from heddle_dask.core.ids import EngineId
from heddle_dask.strategies.admission.engine_snapshot import AdmissionSite
from heddle_dask.strategies.admission.least_held import LeastHeld

# An engine is looked at although nothing was heard of it after so many calls of `next_in_turn`, or after as many as a
# share of those that live at the one before it: a look takes time for each of them.
_EVERY = 8
_EVERY_RESIDENTS = 0.1


@dataclass(frozen=True, slots=True)
class Refusal:
    """When an engine that took nobody may take one: fewer live there, so few generate or queue, or a short one comes.

    Attributes
    ----------
    share
        What it held then, as a share of what it may.
    site
        It as it was then; None where only the queue was too long.
    deadline
        Where time alone was wanting: when there would be enough of it.
    """

    held: int
    most_queued: float
    share: float
    site: AdmissionSite | None
    deadline: float | None = None


class EngineGate:
    """Open and closed engines. Of the open ones the one with the least number is next; of equals the first to join."""

    def __init__(self) -> None:
        self.refused: dict[EngineId, Refusal] = {}
        self.late: dict[EngineId, float] = {}
        self._open = LeastHeld()
        # Those that refused for want of memory, by what they held.
        self._full: list[tuple[float, int, EngineId]] = []
        # Calls until the next turn, and the number of the turn.
        self._until_turn = 0
        self._turn = 0

    def reset(self, numbered: Iterable[tuple[Engine, float]]) -> None:
        """These engines there are, and all are open."""
        self._open = LeastHeld(numbered)
        self.refused.clear()
        self.late.clear()
        self._full.clear()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, name: EngineId) -> bool:
        return name in self._open

    def next(self) -> Engine | None:
        """The open one that is to be asked next."""
        return self._open.least()

    def put(self, engine: Engine, number: float) -> None:
        """An open one has this number now."""
        self._open.put(engine, number)

    def close(self, engine: Engine, refusal: Refusal) -> None:
        """It took nobody."""
        name = engine.engine_id
        self._open.drop(name)
        self.refused[name] = refusal
        if refusal.site is not None:
            insort(self._full, (refusal.share, engine.number, name))
        if refusal.deadline is not None:
            self.late[name] = refusal.deadline

    def open(self, engine: Engine, number: float) -> None:
        """A closed one may take somebody again."""
        name = engine.engine_id
        refusal = self.refused.pop(name)
        self.late.pop(name, None)
        if refusal.site is not None:
            del self._full[bisect_left(self._full, (refusal.share, engine.number, name))]
        self._open.put(engine, number)

    def full_sites(self) -> Iterator[AdmissionSite]:
        """Those that refused for want of memory or time, as they were; who held least first."""
        for _, _, name in self._full:
            site = self.refused[name].site
            assert site is not None, name
            yield site

    def next_in_turn(self, engines: Sequence[Engine]) -> Engine | None:
        """Predictions fall too: each engine has its turn, now and then."""
        if self._until_turn > 0:
            self._until_turn -= 1
            return None
        engine = engines[self._turn % len(engines)]
        self._turn += 1
        self._until_turn = max(_EVERY, round(_EVERY_RESIDENTS * len(engine.residents))) - 1
        return engine
