"""Engines that an admission still has to consider.

An engine that rejected every waiting trajectory is skipped until its load has dropped or a trajectory arrives that may
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

# Unchanged engines are checked in turn: the next one after `_EVERY` calls of `next_in_turn`, or, if that is more, after
# `_EVERY_RESIDENTS` calls for each resident of the engine checked last, because a check takes time for each resident.
_EVERY = 8
_EVERY_RESIDENTS = 0.1


@dataclass(frozen=True, slots=True)
class Rejection:
    """The state of an engine that rejected all waiting trajectories, and the condition for asking it again.

    Attributes
    ----------
    held
        Number of trajectories on the engine at the rejection.
    most_queued
        Ask again when at most this many steps generate or queue there.
    share
        Share of its capacity that was in use at the rejection.
    snapshot
        The engine at the rejection; None if only its queue was too long.
    deadline
        If it lacked only time: the earliest deadline that it would meet with one more trajectory (`Deadline`).
    """

    held: int
    most_queued: float
    share: float
    snapshot: EngineSnapshot | None
    deadline: float | None = None


class CandidateEngines:
    """Open and closed engines. The open engine with the smallest sort key is next; the first to join breaks ties.

    The sort key is the `number` of the methods (`KvFit._turn_of`).

    Attributes
    ----------
    rejections
        The closed engines.
    late
        Deadlines of the closed engines that lack only time.
    """

    def __init__(self) -> None:
        self.rejections: dict[EngineId, Rejection] = {}
        self.late: dict[EngineId, float] = {}
        self._open = LeastHeld()
        # The closed engines that lack memory or time, sorted by `Rejection.share`.
        self._full: list[tuple[float, int, EngineId]] = []
        # Calls until the next engine in turn, and the number of the turn.
        self._until_turn = 0
        self._turn = 0

    def reset(self, numbered: Iterable[tuple[Engine, float]]) -> None:
        """Replace all engines by these, all open."""
        self._open = LeastHeld(numbered)
        self.rejections.clear()
        self.late.clear()
        self._full.clear()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, name: EngineId) -> bool:
        return name in self._open

    def next(self) -> Engine | None:
        return self._open.least()

    def put(self, engine: Engine, number: float) -> None:
        """Change the sort key of an open engine."""
        self._open.put(engine, number)

    def close(self, engine: Engine, rejection: Rejection) -> None:
        """Close an engine that rejected all waiting trajectories."""
        name = engine.engine_id
        self._open.drop(name)
        self.rejections[name] = rejection
        if rejection.snapshot is not None:
            insort(self._full, (rejection.share, engine.number, name))
        if rejection.deadline is not None:
            self.late[name] = rejection.deadline

    def open(self, engine: Engine, number: float) -> None:
        name = engine.engine_id
        rejection = self.rejections.pop(name)
        self.late.pop(name, None)
        if rejection.snapshot is not None:
            del self._full[bisect_left(self._full, (rejection.share, engine.number, name))]
        self._open.put(engine, number)

    def full(self) -> Iterator[EngineSnapshot]:
        """Snapshots of the closed engines that lacked memory or time, least used share first."""
        for _, _, name in self._full:
            snapshot = self.rejections[name].snapshot
            assert snapshot is not None, name
            yield snapshot

    def next_in_turn(self, engines: Sequence[Engine]) -> Engine | None:
        """Once in several calls the next engine in turn, since predictions may fall unnoticed; else None."""
        if self._until_turn > 0:
            self._until_turn -= 1
            return None
        engine = engines[self._turn % len(engines)]
        self._turn += 1
        self._until_turn = max(_EVERY, round(_EVERY_RESIDENTS * len(engine.residents))) - 1
        return engine
