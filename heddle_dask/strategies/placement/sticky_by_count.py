"""Sticky placement by count, as veRL assigns: a trajectory starts on the engine with the fewest and stays there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.nouns import StepRequest
from heddle_dask.strategies.placement.least_load import pick_least
from heddle_dask.strategies.placement.sticky import home_among


def assigned(engine: Engine) -> tuple[float, ...]:
    """Number of live trajectories with this home."""
    return (len(engine.residents),)


@dataclass(slots=True)
class StickyByCount:
    """The home; without one, the engine with the fewest live trajectories, whatever their contexts and its slots."""

    seed: int = 0
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def choose_engine(self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Engine:
        """The home, else the candidate with the fewest live trajectories."""
        home = home_among(trajectory, candidates)
        if home is not None:
            return home
        counts = [len(engine.residents) for engine in candidates]
        return pick_least(candidates, counts, assigned, self._rng)
