"""Additions to `Trajectory.remaining_tokens`: a value when it is unknown, and its distribution."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist
from typing import get_args

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.nouns import Quantile

QUANTILES: tuple[Quantile, ...] = get_args(Quantile)

_NORMAL = NormalDist()
_NORMAL_Q90 = _NORMAL.inv_cdf(0.9)


def remaining_or_context_tokens(trajectory: Trajectory, quantile: Quantile = "median") -> float:
    """`Trajectory.remaining_tokens`; if unknown, the length of its context, at least 1.

    For decisions that need a length for every trajectory, even without a predictor.
    """
    remaining = trajectory.remaining_tokens(quantile)
    if remaining is not None:
        return remaining
    return float(max(trajectory.context_tokens, trajectory.spec.prompt_tokens, 1))


@functools.lru_cache(maxsize=1 << 16)
def _mean_tokens(median: float, q90: float) -> float:
    """Mean of the log-normal distribution with these quantiles; at most the 0.9 quantile."""
    if median <= 0 or q90 <= median:
        return q90
    spread = math.log(q90 / median) / _NORMAL_Q90
    return min(q90, median * math.exp(spread * spread / 2))


def remaining_lengths(
    trajectory: Trajectory, count: int, unseen_tokens: float = 0.0
) -> tuple[float, tuple[float, ...]]:
    """Mean and distribution of the remaining tokens; 0 when unknown.

    Parameters
    ----------
    count
        Maximum number of lengths, each the mean of one of `count` equally likely parts of a log-normal distribution.
        An exact prediction, or a count of 1, gives one length: the mean.
    unseen_tokens
        Estimated tokens that the running step has sampled but not reported. They count as generated.

    Returns
    -------
    tuple
        The mean, and the equally likely lengths, ascending, at least one. Lengths that the trajectory has already
        exceeded are left out.
    """
    said = trajectory.prediction
    median, q90 = (0.0, 0.0) if said is None else (said.tokens, said.tokens_q90)
    # An exact prediction needs no distribution, and must not evict others from the cache.
    mean, lengths = (q90, (q90,)) if q90 <= median else _length_distribution(median, q90, count)
    done = trajectory.tokens_since_prediction + unseen_tokens
    if done <= 0:
        return mean, lengths
    left = tuple([tokens - done for tokens in lengths if tokens > done])
    return max(0.0, mean - done), left or (0.0,)


@functools.lru_cache(maxsize=1 << 16)
def _length_distribution(median: float, q90: float, count: int) -> tuple[float, tuple[float, ...]]:
    """Mean, and means of the parts: the share of a log-normal's mean below quantile p is cdf(z_p - spread)."""
    mean = _mean_tokens(median, q90)
    if count == 1 or median <= 0 or q90 <= median:
        return mean, (mean,)
    spread = math.log(q90 / median) / _NORMAL_Q90
    below = [_NORMAL.cdf(_NORMAL.inv_cdf(part / count) - spread) for part in range(1, count)]
    whole = count * median * math.exp(spread * spread / 2)
    parts = [whole * (end - start) for start, end in zip([0.0, *below], [*below, 1.0], strict=True)]
    # With hardly any spread they differ by rounding only and may be out of order.
    return mean, tuple(sorted(parts))
