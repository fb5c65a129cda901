"""Admission by a limit on the number of live trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from heddle_dask.core.view import Admit, ClusterView


@dataclass(frozen=True, slots=True)
class Unlimited:
    """Admit every trajectory when it is submitted."""

    def admit(self, view: ClusterView) -> Sequence[Admit]:
        return [Admit(trajectory) for trajectory in view.unadmitted]


@dataclass(frozen=True, slots=True)
class AtMost:
    """Keep at most so many trajectories alive, in order of submission.

    Parameters
    ----------
    alive
        Limit for the whole cluster.
    per_engine
        Limit for each ready engine, in place of `alive`: it follows engines that join or leave. slime has such a limit,
        a semaphore of `sglang_server_concurrency` (512) times engines around the whole multi-turn generation.
    """

    alive: int | None = None
    per_engine: int | None = None

    def __post_init__(self) -> None:
        given = {"alive": self.alive, "per_engine": self.per_engine}
        limits = {name: limit for name, limit in given.items() if limit is not None}
        if len(limits) != 1:
            raise ValueError("it needs one of the options alive and per_engine, as in admission=at-most,alive=64")
        for name, limit in limits.items():
            if not isinstance(limit, int) or limit < 1:
                raise ValueError(f"{name} is {limit!r}; it must be a whole number from 1")

    def admit(self, view: ClusterView) -> Sequence[Admit]:
        room = max(0, self._limit(view) - view.alive)
        return [Admit(trajectory) for trajectory in islice(view.unadmitted, room)]

    def _limit(self, view: ClusterView) -> int:
        if self.alive is not None:
            return self.alive
        assert self.per_engine is not None
        return self.per_engine * len(view.ready_engines)
