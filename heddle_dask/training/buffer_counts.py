"""What became of the samples: drops by cause, ages, lengths, mixes. Counted from the events of a sample buffer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from heddle_dask.training.buffer_events import NO_VARIANCE, BufferedGroup

_PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Trained tokens of trajectories; all 0.0 without any."""

    trajectories: int
    mean_tokens: float
    p50_tokens: float
    p90_tokens: float
    p99_tokens: float

    @classmethod
    def of(cls, tokens: Mapping[int, int]) -> Lengths:
        """From a count of trajectories by their tokens."""
        if not tokens:
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        values = np.array(sorted(tokens))
        counts = np.array([tokens[int(value)] for value in values])
        total = int(counts.sum())
        below = np.cumsum(counts)
        # The smallest length that at least so many per cent do not exceed.
        quantiles = [float(values[np.searchsorted(below, total * percent / 100)]) for percent in _PERCENTS]
        return cls(total, float((values * counts).sum() / total), *quantiles)


@dataclass(slots=True)
class BufferCounts:
    """Since the training began.

    Attributes
    ----------
    sampled_groups, trained_groups
        By environment: the mix that arrived, and the one that went into batches.
    dropped_groups, dropped_trajectories, dropped_tokens
        By cause.
    staleness
        Trajectories in batches by their n - b.
    truncated, trained_trajectories
        Of the trajectories in batches.
    """

    sampled_groups: Counter[str] = field(default_factory=Counter)
    trained_groups: Counter[str] = field(default_factory=Counter)
    dropped_groups: Counter[str] = field(default_factory=Counter)
    dropped_trajectories: Counter[str] = field(default_factory=Counter)
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    truncated: int = 0
    trained_trajectories: int = 0
    _sampled_tokens: Counter[int] = field(default_factory=Counter)
    _trained_tokens: Counter[int] = field(default_factory=Counter)

    @property
    def sampled_lengths(self) -> Lengths:
        """Of all trajectories that ended, dropped ones included."""
        return Lengths.of(self._sampled_tokens)

    @property
    def trained_lengths(self) -> Lengths:
        """Of the trajectories that went into batches."""
        return Lengths.of(self._trained_tokens)

    @property
    def share_without_variance(self) -> float:
        """Of the groups that arrived; 0.0 before the first."""
        arrived = self.sampled_groups.total()
        return self.dropped_groups[NO_VARIANCE] / arrived if arrived else 0.0

    @property
    def truncated_share(self) -> float:
        """Of the trajectories in batches; 0.0 before the first."""
        return self.truncated / self.trained_trajectories if self.trained_trajectories else 0.0

    def arrived(self, environment: str, sampled_tokens: Iterable[int]) -> None:
        """A group has ended."""
        self.sampled_groups[environment] += 1
        self._sampled_tokens.update(sampled_tokens)

    def dropped(self, cause: str, sampled_tokens: Sequence[int]) -> None:
        """A group goes into no batch."""
        self.dropped_groups[cause] += 1
        self.dropped_trajectories[cause] += len(sampled_tokens)
        self.dropped_tokens[cause] += sum(sampled_tokens)

    def formed(self, step: int, groups: Iterable[BufferedGroup]) -> None:
        """These groups are the batch of an optimiser step."""
        for group in groups:
            self.trained_groups[group.environment] += 1
            self._trained_tokens.update(group.sampled_tokens)
            self.staleness.update(step - 1 - version for version in group.first_versions)
            self.truncated += sum(group.truncated)
            self.trained_trajectories += len(group.rewards)
