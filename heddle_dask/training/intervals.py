"""Bootstrap intervals of rewards over tasks. NumPy only; seeded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

DRAWS: Final = 10_000
LEVEL: Final = 0.95


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """A mean with its bootstrap interval; `low` and `high` equal `mean` where there is one value only."""

    mean: float
    low: float
    high: float

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high


def bootstrap_mean(values: npt.ArrayLike, *, seed: int = 0, draws: int = DRAWS, level: float = LEVEL) -> MeanInterval:
    """The mean of `values` and its percentile interval over resampled values.

    Raises
    ------
    ValueError
        There is no value.
    """
    array = _values(values)
    means = resampled_means(array, np.random.default_rng(seed), draws)
    return interval_of(float(array.mean()), means, level)


def paired_difference(
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    seed: int = 0,
    draws: int = DRAWS,
    level: float = LEVEL,
) -> MeanInterval:
    """Mean of after - before over the tasks that have both, and its interval over resampled tasks.

    Pairing takes the difficulty of the tasks out of the comparison.

    Parameters
    ----------
    before, after
        Mean reward by task.

    Raises
    ------
    ValueError
        No task has both.
    """
    return bootstrap_mean(task_differences(before, after), seed=seed, draws=draws, level=level)


def task_differences(before: Mapping[str, float], after: Mapping[str, float]) -> npt.NDArray[np.float64]:
    """after - before of each task that has both; a ValueError where none has."""
    both = sorted(before.keys() & after.keys())
    return _values([after[task] - before[task] for task in both])


def _values(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    array = np.asarray(values, np.float64).ravel()
    if not len(array):
        raise ValueError("no values")
    return array


def resampled_means(values: npt.NDArray[np.float64], rng: np.random.Generator, draws: int) -> npt.NDArray[np.float64]:
    """Means of `draws` resamples, in pieces: a thousand tasks by ten thousand draws would take 80 MB at once."""
    at_once = max(1, 1_000_000 // len(values))
    pieces = []
    for start in range(0, draws, at_once):
        rows = min(at_once, draws - start)
        pieces.append(values[rng.integers(len(values), size=(rows, len(values)))].mean(axis=1))
    return np.concatenate(pieces)


def interval_of(mean: float, means: npt.NDArray[np.float64], level: float) -> MeanInterval:
    """The interval that holds this share of the resampled means."""
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return MeanInterval(mean, float(low), float(high))
