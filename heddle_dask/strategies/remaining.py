"""What strategies add to `Trajectory.remaining_tokens`: an assumption where it is unknown, and its distribution."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist
from typing import get_args

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.prediction import Quantile

QUANTILES: tuple[Quantile, ...] = get_args(Quantile)

_NORMAL = NormalDist()
_NORMAL_Q90 = _NORMAL.inv_cdf(0.9)


def remaining_or_context_tokens(trajectory: Trajectory, quantile: Quantile = "median") -> float:
    """`Trajectory.remaining_tokens`; where that is unknown, as many tokens as its context holds, at least 1.

    For decisions that need a length for every trajectory, also without a predictor.
    """
    remaining = trajectory.remaining_tokens(quantile)
    if remaining is not None:
        return remaining
    return float(max(trajectory.context_tokens, trajectory.spec.prompt_tokens, 1))


@functools.lru_cache(maxsize=1 << 16)
def _mean_tokens(median: float, q90: float) -> float:
    """The mean; at most the 0.9 quantile."""
    if median <= 0 or q90 <= median:
        return q90
    spread = math.log(q90 / median) / _NORMAL_Q90
    return min(q90, median * math.exp(spread * spread / 2))


def remaining_lengths(
    trajectory: Trajectory, count: int, unseen_tokens: float = 0.0
) -> tuple[float, tuple[float, ...]]:
    """Mean and distribution of what `Trajectory.remaining_tokens` tells by its median; unknown counts as 0.

    Parameters
    ----------
    count
        At most so many lengths, each the mean of one of `count` equally likely parts of a log-normal distribution. A
        prediction without spread, and a count of 1, give one length: the mean.
    unseen_tokens
        Tokens that the running step has sampled and not reported yet. They count as generated.

    Returns
    -------
    tuple
        The mean, and the equally likely lengths, ascending, at least one. Lengths that the trajectory has outlived
        since the prediction are left out.
    """
    said = trajectory.prediction
    median, q90 = (0.0, 0.0) if said is None else (said.tokens, said.tokens_q90)
    # An exact prediction needs no distribution, and must not displace others from the cache.
    mean, lengths = (q90, (q90,)) if q90 <= median else _length_distribution(median, q90, count)
    done = trajectory.tokens_since_prediction + unseen_tokens
    if done <= 0:
        return mean, lengths
    left = tuple([tokens - done for tokens in lengths if tokens > done])
    return max(0.0, mean - done), left or (0.0,)


@functools.lru_cache(maxsize=1 << 16)
def _length_distribution(median: float, q90: float, count: int) -> tuple[float, tuple[float, ...]]:
    """Mean, and means of the parts: a log-normal's mean below quantile p is cdf(z_p - spread) of the whole."""
    mean = _mean_tokens(median, q90)
    if count == 1 or median <= 0 or q90 <= median:
        return mean, (mean,)
    spread = math.log(q90 / median) / _NORMAL_Q90
    below = [_NORMAL.cdf(_NORMAL.inv_cdf(part / count) - spread) for part in range(1, count)]
    whole = count * median * math.exp(spread * spread / 2)
    parts = [whole * (end - start) for start, end in zip([0.0, *below], [*below, 1.0], strict=True)]
    # Sorted: where there is hardly any spread, they differ by rounding alone.
    return mean, tuple(sorted(parts))
