"""Sticky placement: a hash chooses the first engine of a trajectory, which keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from heddle_dask.core.engine_list import engine_among
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.nouns import StepRequest


def home_among(trajectory: Trajectory, candidates: Sequence[Engine]) -> Engine | None:
    """The trajectory's home if it is a candidate."""
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
        """The home, else the candidate of largest hash weight."""
        home = home_among(trajectory, candidates)
        if home is not None:
            return home
        name = trajectory.trajectory_id
        return max(candidates, key=lambda engine: hash_weight(name, engine.engine_id))
