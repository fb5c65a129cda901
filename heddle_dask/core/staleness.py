"""The bound on the age of trajectories (RollArt, section 6.2), and the credits that keep it (AReaL).

n is the number of finished optimiser steps, b the version that sampled the first token of a trajectory. A trajectory is
valid while n - b <= alpha. The delay between an optimiser step and the installation of its weights counts: b grows only
when engines sample with the newer weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from heddle_dask.core.errors import BadInput

StalenessMode = Literal["cancel", "pace"]

STALE: Final = "stale"
"""Cause of a cancellation: the trajectory would exceed the bound."""

REDUNDANT: Final = "redundant"
"""Cause of a cancellation: enough other members of its group, or other groups, have finished."""


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """How old a trajectory may be when it is trained on.

    Attributes
    ----------
    alpha
        The largest allowed n - b.
    mode
        ``"cancel"``: what exceeds the bound is cancelled at once, with its group, and its task is requested again.
        ``"pace"``: admission keeps the bound by credits, and nothing is cancelled.
    batch_trajectories
        Trajectories that one optimiser step takes (B).
    redundant_trajectories
        Trajectories beyond the credits that may run at a time: the driver cancels as many when the first have finished.

    Raises
    ------
    BadInput
    """

    alpha: int = 1
    mode: StalenessMode = "cancel"
    batch_trajectories: int = 1
    redundant_trajectories: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int) or self.alpha < 0:
            raise BadInput(f"alpha is {self.alpha!r}: use a whole number of at least 0")
        if self.mode not in ("cancel", "pace"):
            raise BadInput(f"staleness is {self.mode!r}: use cancel or pace")
        if self.batch_trajectories < 1:
            raise BadInput(f"a batch of {self.batch_trajectories} trajectories: use at least 1")
        if self.redundant_trajectories < 0:
            raise BadInput(f"{self.redundant_trajectories} redundant trajectories: use at least 0")

    def is_valid(self, optimizer_steps: int, first_version: int) -> bool:
        """Whether a trajectory that began under `first_version` may be trained on in step `optimizer_steps` + 1."""
        return optimizer_steps - first_version <= self.alpha

    def credits(self, optimizer_steps: int, accepted: int, running: int) -> int:
        """How many more trajectories may start: (alpha + n + 1) B - accepted - running, and the redundant ones.

        Parameters
        ----------
        optimizer_steps
            Since the training began or was resumed; `accepted` counts from there too.
        accepted
            Trajectories that went into batches or wait in the buffer.
        running
            Trajectories that are admitted, or whose group has begun, and that are neither accepted nor dropped.
        """
        most = (self.alpha + optimizer_steps + 1) * self.batch_trajectories + self.redundant_trajectories
        return most - accepted - running
