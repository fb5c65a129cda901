"""Placement of steps on the engines in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import EngineId
from heddle_dask.core.nouns import StepRequest


@dataclass(slots=True)
class RoundRobin:
    """Each step goes to the least recently used engine; caches are ignored.

    Turns are recorded per engine, not as a position in a list: the list of candidates changes when an engine joins,
    is lost, or is too small for a long context.
    """

    _last_turn: dict[EngineId, int] = field(default_factory=dict)
    _turn: int = 0

    def choose_engine(self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Engine:
        """The least recently used candidate; of unused ones the first to join."""
        choice = min(candidates, key=lambda e: (self._last_turn.get(e.engine_id, 0), e.number))
        self._turn += 1
        self._last_turn[choice.engine_id] = self._turn
        return choice
