"""Admission by a limit on the number of live trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heddle_dask.core.view import Admit, ClusterView


@dataclass(frozen=True, slots=True)
class Unlimited:
    """Admit every trajectory when it is submitted."""

    def admit(self, view: ClusterView) -> Sequence[Admit]:
        """Admit all waiting trajectories."""
        return [Admit(trajectory) for trajectory in view.unadmitted]


@dataclass(frozen=True, slots=True)
class AtMost:
    """Keep at most `alive` trajectories alive, in order of submission.

    slime has such a limit: a semaphore of concurrency times engines around the whole multi-turn generation.
    """

    alive: int

    def __post_init__(self) -> None:
        if not isinstance(self.alive, int) or self.alive < 1:
            raise ValueError(f"alive is {self.alive!r}; it must be a whole number from 1")

    def admit(self, view: ClusterView) -> Sequence[Admit]:
        """Admit the oldest waiting trajectories up to the limit."""
        room = max(0, self.alive - view.alive)
        return [Admit(t) for t, _ in zip(view.unadmitted, range(room), strict=False)]
