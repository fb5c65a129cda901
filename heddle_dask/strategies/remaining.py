"""How many tokens a trajectory may have left, from the two quantiles that a predictor tells, as if log-normal."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

from heddle_dask.core.entities import Trajectory

QUANTILES = ("median", "q90")

_NORMAL = NormalDist()
_NORMAL_Q90 = _NORMAL.inv_cdf(0.9)


def remaining_tokens(trajectory: Trajectory, quantile: str = "median") -> float:
    """Predicted tokens still to be generated; without a prediction as many as its context holds, at least 1."""
    said = trajectory.prediction
    predicted = 0.0 if said is None else said.tokens if quantile == "median" else said.tokens_q90
    if predicted > 0:
        return predicted
    return float(max(trajectory.context_tokens, trajectory.spec.prompt_tokens, 1))


@functools.lru_cache(maxsize=1 << 16)
def _mean_tokens(median: float, q90: float) -> float:
    """The mean; at most the 0.9 quantile."""
    if median <= 0 or q90 <= median:
        return q90
    spread = math.log(q90 / median) / _NORMAL_Q90
    return min(q90, median * math.exp(spread * spread / 2))


def is_certain(trajectory: Trajectory) -> bool:
    """Whether the prediction leaves no doubt, as an oracle's."""
    return trajectory.prediction is not None and trajectory.prediction.is_exact


def left_now(
    trajectory: Trajectory, count: int, unseen_tokens: float = 0.0
) -> tuple[float, tuple[float, ...]]:
    """What is left in the mean, and what may be left: at most `count` lengths, equally likely, ascending, never none.

    Each is the mean of one of `count` equally likely parts of the law. Those that the trajectory has outlived since it
    was predicted are gone. A prediction without spread, and a `count` of 1, give one: the mean. `unseen_tokens` are
    those that its running step has sampled, which it has not reported yet.
    """
    said = trajectory.prediction
    median, q90 = (0.0, 0.0) if said is None else (said.tokens, said.tokens_q90)
    # What is certain is no law, and would drive the laws from the memory.
    mean, lengths = (q90, (q90,)) if q90 <= median else _law_tokens(median, q90, count)
    done = trajectory.generated_tokens - trajectory.predicted_at_tokens + unseen_tokens
    if done <= 0:
        return mean, lengths
    left = tuple([tokens - done for tokens in lengths if tokens > done])
    return max(0.0, mean - done), left or (0.0,)


@functools.lru_cache(maxsize=1 << 16)
def _law_tokens(median: float, q90: float, count: int) -> tuple[float, tuple[float, ...]]:
    """Mean, and means of the parts: the mean below quantile p of a log-normal law is cdf(z_p - spread) of the whole."""
    mean = _mean_tokens(median, q90)
    if count == 1 or median <= 0 or q90 <= median:
        return mean, (mean,)
    spread = math.log(q90 / median) / _NORMAL_Q90
    below = [_NORMAL.cdf(_NORMAL.inv_cdf(part / count) - spread) for part in range(1, count)]
    whole = count * median * math.exp(spread * spread / 2)
    parts = [whole * (end - start) for start, end in zip([0.0, *below], [*below, 1.0], strict=True)]
    # Sorted: where the law has hardly any spread, they differ by rounding alone.
    return mean, tuple(sorted(parts))
