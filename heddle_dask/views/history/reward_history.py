"""Rewards as they become known: mean, spread, share solved, and groups from which nothing can be learned.

The progress line, `heddle top`, the page and the metrics all show what this fold says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

SOLVED_FROM: Final = 1.0
"""Least reward of a solved task."""

MOST_OPEN_GROUPS: Final = 10_000
"""Groups whose rewards are remembered; the oldest one stays counted as it is then."""


@dataclass(frozen=True, slots=True)
class RewardView:
    """Rewards of ended trajectories.

    Attributes
    ----------
    known, unknown
        Trajectories with and without a reward.
    mean, spread
        Of the known rewards, `spread` as the standard deviation; None before the first.
    solved_share
        Share of the known rewards that are 1 or more.
    groups, flat_groups
        Groups of which two rewards or more are known, and those of them whose rewards are all equal.
    """

    known: int = 0
    unknown: int = 0
    mean: float | None = None
    spread: float | None = None
    solved_share: float | None = None
    groups: int = 0
    flat_groups: int = 0

    @property
    def flat_share(self) -> float | None:
        """Share of the groups without spread; None before the first."""
        return self.flat_groups / self.groups if self.groups else None

    def line(self) -> str:
        """The figures in words; empty while no reward is known."""
        if self.mean is None or self.spread is None or self.solved_share is None:
            return ""
        flat = "" if self.flat_share is None else f", {self.flat_share:.0%} of groups without spread"
        return f"reward {self.mean:.3f} ± {self.spread:.2f}, solved {self.solved_share:.0%}{flat}"


class RewardTally:
    """A fold over ended trajectories, in constant time and bounded memory."""

    def __init__(self) -> None:
        self.known = 0
        self._unknown = 0
        self._total = 0.0
        self._mean = self._squares = 0.0  # Welford: sums of squares of large numbers lose their last digits
        self._solved = 0
        self._groups: dict[str, tuple[int, float, float]] = {}  # number, least and most of the known rewards
        self._compared = self._flat = 0

    def add(self, group_id: str, reward: float | None) -> None:
        """Count one trajectory; a reward that is None or not finite is unknown."""
        if reward is None or not math.isfinite(reward):
            self._unknown += 1
            return
        self.known += 1
        self._total += reward
        before = reward - self._mean
        self._mean += before / self.known
        self._squares += before * (reward - self._mean)
        self._solved += reward >= SOLVED_FROM
        self._add_to_group(group_id, reward)

    def _add_to_group(self, group_id: str, reward: float) -> None:
        known = self._groups.get(group_id)
        if known is None:
            if len(self._groups) >= MOST_OPEN_GROUPS:
                del self._groups[next(iter(self._groups))]
            self._groups[group_id] = (1, reward, reward)
            return
        number, least, most = known
        if number == 1:
            self._compared += 1
            self._flat += reward == least
        elif least == most:
            self._flat -= reward != least
        self._groups[group_id] = (number + 1, min(least, reward), max(most, reward))

    @property
    def mean(self) -> float | None:
        return self._total / self.known if self.known else None

    def view(self) -> RewardView:
        """What views show; figures that need rewards are None without them."""
        mean = self.mean
        if mean is None:
            return RewardView(unknown=self._unknown)
        return RewardView(
            known=self.known,
            unknown=self._unknown,
            mean=mean,
            spread=math.sqrt(max(0.0, self._squares) / self.known),
            solved_share=self._solved / self.known,
            groups=self._compared,
            flat_groups=self._flat,
        )
