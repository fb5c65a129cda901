"""Preemption: a waiting step stops a running one that matters clearly less (Heddle, Algorithm 1, with a margin)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.priority import Priority


@dataclass(frozen=True, slots=True)
class Hysteresis:
    """Stop the running step of lowest priority when the waiting one's is higher by a margin.

    The paper prints no margin; two nearly equal predictions would then swap for ever, each paying its turn.

    Parameters
    ----------
    ratio, margin_tokens
        For priorities without levels (longest-first): the tokens of the waiting step must be above ``ratio`` times
        those of the running one, and above them by ``margin_tokens``.
    margin_levels
        For priorities with levels (group-first: lacking members; least-attained: levels of its queue): the waiting step
        must be this many levels above the running one; tokens only order the steps of one level. First come, first
        served never preempts: a waiting step came later.
    least_wait_tokens
        Nobody is stopped where a slot is about to be free anyway: where the running steps, each taken to have as much
        left as its trajectory's steps have had on average, are expected to leave one within so many tokens. Stopping
        costs both engine and control plane a turn, and would save the waiting step no more than that time. A running
        trajectory without a finished step is taken to keep its slot.
    """

    ratio: float = 1.5
    margin_tokens: float = 256.0
    margin_levels: int = 1
    least_wait_tokens: float = 16.0

    def __post_init__(self) -> None:
        if self.ratio < 1 or self.margin_tokens < 0:
            raise ValueError(
                f"ratio={self.ratio}, margin_tokens={self.margin_tokens}: use at least 1 and at least 0"
            )
        if self.margin_levels < 1:
            raise ValueError(f"margin_levels={self.margin_levels}: use at least 1")
        if self.least_wait_tokens < 0:
            raise ValueError(f"least_wait_tokens={self.least_wait_tokens}: use at least 0")

    def victim(self, waiting: Trajectory, running: Sequence[Trajectory]) -> Trajectory | None:
        """The least of `running`, the latest of equals, if it is clearly less than `waiting`."""
        least = min([t.priority for t in running])
        if not self._clearly_above(waiting.priority, least):
            return None
        if self.least_wait_tokens and _wait_tokens(running) < self.least_wait_tokens:
            return None
        return max((t for t in running if t.priority == least), key=lambda t: t.number)

    def _clearly_above(self, waiting: Priority, running: Priority) -> bool:
        if waiting.level or running.level:
            return waiting.level - running.level >= self.margin_levels
        return waiting.tokens > max(self.ratio * running.tokens, running.tokens + self.margin_tokens)


def _wait_tokens(running: Sequence[Trajectory]) -> float:
    """Tokens until the first of the running steps ends, as if each ended at its own constant rate."""
    ends_per_token = sum(
        [t.steps_finished / max(1, t.generated_tokens - t.open_step_tokens) for t in running]
    )
    return 1.0 / ends_per_token if ends_per_token else math.inf
