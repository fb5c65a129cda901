"""Preemption of a running step with clearly lower priority (Heddle, Algorithm 1, with a margin)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.nouns import Priority


@dataclass(frozen=True, slots=True)
class Hysteresis:
    """Preempt the running step of lowest priority if the waiting step's priority is higher by a margin.

    The paper has no margin; two nearly equal predictions would then preempt each other repeatedly, each time at a cost.

    Parameters
    ----------
    ratio, margin_tokens
        For priorities without levels (longest-first): the tokens of the waiting step must be above ``ratio`` times
        those of the running one, and above them by ``margin_tokens``.
    margin_levels
        For priorities with levels (group-first: missing members; least-attained: queue levels): the waiting step must
        be this many levels above the running one; tokens only order the steps of one level. First come, first served
        never preempts, since a waiting step arrived later.
    least_wait_tokens
        No preemption if a slot is expected to become free within so many tokens. Each running step is assumed to end
        at a constant rate, with the mean length of its trajectory's earlier steps; a trajectory without a finished
        step is assumed to keep its slot. A preemption costs time of engine and control plane and would save the
        waiting step at most this wait.
    """

    ratio: float = 1.5
    margin_tokens: float = 256.0
    margin_levels: int = 1
    least_wait_tokens: float = 16.0

    def __post_init__(self) -> None:
        if self.ratio < 1 or self.margin_tokens < 0:
            raise ValueError(f"ratio={self.ratio}, margin_tokens={self.margin_tokens}: use at least 1 and at least 0")
        if self.margin_levels < 1:
            raise ValueError(f"margin_levels={self.margin_levels}: use at least 1")
        if self.least_wait_tokens < 0:
            raise ValueError(f"least_wait_tokens={self.least_wait_tokens}: use at least 0")

    def victim(self, waiting: Trajectory, running: Sequence[Trajectory]) -> Trajectory | None:
        """The lowest of `running` (ties: the latest) if it is clearly lower than `waiting`."""
        least = min([t.priority for t in running])
        if not self._clearly_above(waiting.priority, least):
            return None
        if self.least_wait_tokens and _ends_within(self.least_wait_tokens, running):
            return None
        return max((t for t in running if t.priority == least), key=lambda t: t.number)

    def _clearly_above(self, waiting: Priority, running: Priority) -> bool:
        if waiting.level or running.level:
            return waiting.level - running.level >= self.margin_levels
        return waiting.tokens > max(self.ratio * running.tokens, running.tokens + self.margin_tokens)


def _ends_within(tokens: float, running: Sequence[Trajectory]) -> bool:
    """Whether the first running step is expected to end sooner, if each ends at its own constant rate.

    A few of the rates usually suffice to say so.
    """
    ends_per_token = 0.0
    for each in running:
        if each.steps_finished:
            ends_per_token += each.steps_finished / max(1, each.generated_tokens - each.open_step_tokens)
            if 1.0 / ends_per_token < tokens:
                return True
    return False
