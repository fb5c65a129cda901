"""Sticky placement: a trajectory keeps its first engine, which a hash, a count or the load chooses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from heddle_dask.core.engine_list import engine_among
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.nouns import StepRequest
from heddle_dask.strategies.placement.least_load import pick_least, resident_load


def home_among(trajectory: Trajectory, candidates: Sequence[Engine]) -> Engine | None:
    return engine_among(candidates, trajectory.home)


def hash_weight(trajectory_id: str, engine_id: str) -> int:
    """A stable pseudo-random weight for the pair; the same in every process."""
    digest = blake2b(f"{trajectory_id}\0{engine_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


@dataclass(frozen=True, slots=True)
class Sticky:
    """The home; without one, rendezvous hashing (routers offer it as consistent hashing by session).

    With rendezvous hashing the loss of an engine moves only the trajectories on it.
    """

    def choose_engine(self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Engine:
        home = home_among(trajectory, candidates)
        if home is not None:
            return home
        name = trajectory.trajectory_id
        return max(candidates, key=lambda engine: hash_weight(name, engine.engine_id))


def assigned(engine: Engine) -> tuple[float, ...]:
    """Number of live trajectories with this home."""
    return (len(engine.residents),)


@dataclass(slots=True)
class StickyByCount:
    """The home; without one, the engine with the fewest live trajectories, whatever their contexts and its slots.

    So veRL assigns.
    """

    seed: int = 0
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def choose_engine(self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Engine:
        home = home_among(trajectory, candidates)
        if home is not None:
            return home
        counts = [len(engine.residents) for engine in candidates]
        return pick_least(candidates, counts, assigned, self._rng)


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
        home = home_among(trajectory, candidates) or engine_among(candidates, trajectory.reserved_on)
        if home is not None:
            return home
        tokens = [engine.resident_tokens / engine.spec.slots for engine in candidates]
        return pick_least(candidates, tokens, resident_load, self._rng)
