"""Admission: how many trajectories are alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heddle_dask.core.view import Admit, ClusterView


@dataclass(frozen=True, slots=True)
class Unlimited:
    """Admit every trajectory when it is submitted."""

    def admit(self, view: ClusterView) -> Sequence[Admit]:
        """All that wait."""
        return [Admit(trajectory) for trajectory in view.unadmitted]


@dataclass(frozen=True, slots=True)
class AtMost:
    """Keep at most `alive` trajectories alive, in order of submission.

    slime's semaphore of concurrency times engines around the whole multi-turn generation is such a cap.
    """

    alive: int

    def __post_init__(self) -> None:
        if not isinstance(self.alive, int) or self.alive < 1:
            raise ValueError(f"alive is {self.alive!r}; it must be a whole number from 1")

    def admit(self, view: ClusterView) -> Sequence[Admit]:
        """As many of the oldest as there is room for."""
        room = max(0, self.alive - view.alive)
        return [Admit(t) for t, _ in zip(view.unadmitted, range(room), strict=False)]
