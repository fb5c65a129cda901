"""Engines that an admission still has to consider.

An engine that rejected every waiting trajectory is skipped until its load has dropped, or a trajectory comes that may
fit.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from heddle_dask.core.entities import Engine
from heddle_dask.core.ids import EngineId
from heddle_dask.strategies.admission.engine_snapshot import EngineSnapshot
from heddle_dask.strategies.admission.least_held import LeastHeld

# An engine is looked at although nothing was heard of it after this many calls of `next_in_turn`, or after as many as
# this share of the residents of the engine before it: a look costs time for each resident.
_EVERY = 8
_EVERY_RESIDENTS = 0.1


@dataclass(frozen=True, slots=True)
class Rejection:
    """An engine that took no waiting trajectory, and when it may take one.

    Attributes
    ----------
    held
        Trajectories it held then.
    most_queued
        It may take one when no more than this many steps generate or queue there.
    share
        What it held then, as a share of what it may.
    snapshot
        The engine as it was then; None where only its queue was too long.
    deadline
        Where only time was missing: the deadline by which there would be enough (`Deadline`).
    """

    held: int
    most_queued: float
    share: float
    snapshot: EngineSnapshot | None
    deadline: float | None = None


class CandidateEngines:
    """Open and closed engines. The open engine with the smallest number is next; of equals the first to join.

    Attributes
    ----------
    rejections
        The closed engines.
    late
        Deadlines of those of them that lack only time.
    """

    def __init__(self) -> None:
        self.rejections: dict[EngineId, Rejection] = {}
        self.late: dict[EngineId, float] = {}
        self._open = LeastHeld()
        # Closed engines that lack memory or time, by what they held.
        self._full: list[tuple[float, int, EngineId]] = []
        # Calls until the next turn, and the number of the turn.
        self._until_turn = 0
        self._turn = 0

    def reset(self, numbered: Iterable[tuple[Engine, float]]) -> None:
        """Start over with these engines, all open."""
        self._open = LeastHeld(numbered)
        self.rejections.clear()
        self.late.clear()
        self._full.clear()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, name: EngineId) -> bool:
        return name in self._open

    def next(self) -> Engine | None:
        """The open engine that is asked next."""
        return self._open.least()

    def put(self, engine: Engine, number: float) -> None:
        """Change the number of an open engine."""
        self._open.put(engine, number)

    def close(self, engine: Engine, rejection: Rejection) -> None:
        """The engine took no waiting trajectory."""
        name = engine.engine_id
        self._open.drop(name)
        self.rejections[name] = rejection
        if rejection.snapshot is not None:
            insort(self._full, (rejection.share, engine.number, name))
        if rejection.deadline is not None:
            self.late[name] = rejection.deadline

    def open(self, engine: Engine, number: float) -> None:
        """A closed engine may take a trajectory again."""
        name = engine.engine_id
        rejection = self.rejections.pop(name)
        self.late.pop(name, None)
        if rejection.snapshot is not None:
            del self._full[bisect_left(self._full, (rejection.share, engine.number, name))]
        self._open.put(engine, number)

    def full(self) -> Iterator[EngineSnapshot]:
        """Closed engines that lacked memory or time, as they were; the one that held least first."""
        for _, _, name in self._full:
            snapshot = self.rejections[name].snapshot
            assert snapshot is not None, name
            yield snapshot

    def next_in_turn(self, engines: Sequence[Engine]) -> Engine | None:
        """Now and then the next engine in turn, because predictions fall too; else None."""
        if self._until_turn > 0:
            self._until_turn -= 1
            return None
        engine = engines[self._turn % len(engines)]
        self._turn += 1
        self._until_turn = max(_EVERY, round(_EVERY_RESIDENTS * len(engine.residents))) - 1
        return engine
