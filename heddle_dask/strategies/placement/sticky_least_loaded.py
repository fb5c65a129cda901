"""Sticky placement: a trajectory starts on the least loaded engine and stays there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from heddle_dask.core.engine_list import engine_among
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.nouns import StepRequest
from heddle_dask.strategies.placement.least_load import pick_least, resident_load
from heddle_dask.strategies.placement.sticky import home_among


@dataclass(slots=True)
class StickyLeastLoaded:
    """The home; without one, the engine of its reservation, else the one with the least resident load.

    Resident tokens are compared, not in-flight tokens: a trajectory in a tool call still has its KV cache there and
    returns.
    """

    seed: int = 0
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def choose_engine(self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Engine:
        """The home, else the engine of its reservation, else the candidate with the least resident load."""
        home = home_among(trajectory, candidates) or engine_among(candidates, trajectory.reserved_on)
        if home is not None:
            return home
        tokens = [engine.resident_tokens / engine.spec.slots for engine in candidates]
        return pick_least(candidates, tokens, resident_load, self._rng)
