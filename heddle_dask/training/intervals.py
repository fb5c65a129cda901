"""Bootstrap intervals of rewards over tasks, and over runs and tasks. NumPy only; seeded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    means = _resampled_means(array, np.random.default_rng(seed), draws)
    return _interval(float(array.mean()), means, level)


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
    return bootstrap_mean(_differences(before, after), seed=seed, draws=draws, level=level)


def difference_over_runs(
    runs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
    *,
    seed: int = 0,
    draws: int = DRAWS,
    level: float = LEVEL,
) -> MeanInterval:
    """As `paired_difference`, over several runs: runs are resampled, and the tasks within each drawn run.

    Each run counts the same.

    Parameters
    ----------
    runs
        (before, after) of each.

    Raises
    ------
    ValueError
        There is no run, or one of them has no task with both.
    """
    if not runs:
        raise ValueError("no runs")
    rng = np.random.default_rng(seed)
    of_runs = [_differences(before, after) for before, after in runs]
    # What one run would show with other tasks; then which runs were drawn.
    within = np.stack([_resampled_means(values, rng, draws * len(of_runs)) for values in of_runs])
    chosen = rng.integers(len(of_runs), size=(draws, len(of_runs)))
    columns = np.arange(draws * len(of_runs)).reshape(draws, len(of_runs))
    means = within[chosen, columns].mean(axis=1)
    return _interval(float(np.mean([values.mean() for values in of_runs])), means, level)


def _differences(before: Mapping[str, float], after: Mapping[str, float]) -> npt.NDArray[np.float64]:
    both = sorted(before.keys() & after.keys())
    return _values([after[task] - before[task] for task in both])


def _values(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    array = np.asarray(values, np.float64).ravel()
    if not len(array):
        raise ValueError("no values")
    return array


def _resampled_means(values: npt.NDArray[np.float64], rng: np.random.Generator, draws: int) -> npt.NDArray[np.float64]:
    """Means of `draws` resamples, in pieces: a thousand tasks by ten thousand draws would take 80 MB at once."""
    at_once = max(1, 1_000_000 // len(values))
    pieces = []
    for start in range(0, draws, at_once):
        rows = min(at_once, draws - start)
        pieces.append(values[rng.integers(len(values), size=(rows, len(values)))].mean(axis=1))
    return np.concatenate(pieces)


def _interval(mean: float, means: npt.NDArray[np.float64], level: float) -> MeanInterval:
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return MeanInterval(mean, float(low), float(high))
