"""Preemption: a waiting step stops a running one that matters clearly less (Heddle, Algorithm 1, with a margin)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heddle_dask.core.state import Trajectory


@dataclass(frozen=True, slots=True)
class Hysteresis:
    """Stop the running step of lowest priority when the waiting one's is higher by a margin.

    The paper prints no margin; two nearly equal predictions would then swap for ever, each paying its turn.

    Parameters
    ----------
    ratio, margin_tokens
        The waiting priority must be above ``ratio`` times the running one, and above it by ``margin_tokens``.
    """

    ratio: float = 1.5
    margin_tokens: float = 256.0

    def __post_init__(self) -> None:
        if self.ratio < 1 or self.margin_tokens < 0:
            raise ValueError(
                f"ratio={self.ratio}, margin_tokens={self.margin_tokens}: use at least 1 and at least 0"
            )

    def victim(self, waiting: Trajectory, running: Sequence[Trajectory]) -> Trajectory | None:
        """The least of `running`, the latest of equals, if it is clearly less than `waiting`."""
        least = min(running, key=lambda t: (t.priority, -t.number))
        if waiting.priority > max(self.ratio * least.priority, least.priority + self.margin_tokens):
            return least
        return None
