"""Placement: engines take turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import EngineId
from heddle_dask.core.nouns import StepRequest


@dataclass(slots=True)
class RoundRobin:
    """Each step goes to the engine whose last turn is longest ago; caches are ignored.

    Turns are remembered per engine and not as one position in a list: the list of candidates changes
    when an engine joins, is lost, or is too small for a long context.
    """

    _last_turn: dict[EngineId, int] = field(default_factory=dict)
    _turn: int = 0

    def choose_engine(
        self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]
    ) -> Engine:
        """The candidate whose last turn is longest ago; of those never used, the first that joined."""
        choice = min(candidates, key=lambda e: (self._last_turn.get(e.engine_id, 0), e.number))
        self._turn += 1
        self._last_turn[choice.engine_id] = self._turn
        return choice
