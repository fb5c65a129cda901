"""Additions to `Trajectory.remaining_tokens`: a value when it is unknown, and its distribution."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist
from typing import NamedTuple, get_args

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
    done = trajectory.generated_tokens - trajectory.predicted_at_tokens + unseen_tokens
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


# Remaining demand of a trajectory in tokens, with tool seconds converted to tokens.
#
# The unit of tokens and tool seconds is the time of one token of a trajectory on a busy engine (`EngineCosts.pace_s`).
# A trajectory that spends most of its time in tools generates few tokens; it may still end last if it starts late, and
# it holds its memory for longer than its tokens alone would.


class RemainingDemand(NamedTuple):
    """Demand of a trajectory from now to its end.

    Attributes
    ----------
    tokens
        Mean remaining tokens.
    lengths
        Remaining tokens as equally likely lengths, ascending.
    stretch
        Mean time of tokens and tools over that of the tokens; at least 1.
    context_tokens
        Context tokens now.
    growth
        Context tokens added per generated token.
    tools_s
        Seconds of tool calls still to come.
    """

    tokens: float
    lengths: tuple[float, ...]
    stretch: float = 1.0
    context_tokens: float = 0.0
    growth: float = 1.0
    tools_s: float = 0.0


def tools_left_s(trajectory: Trajectory) -> float:
    """Seconds of tool calls still to come; 0 when unknown."""
    said = trajectory.prediction
    if said is None or said.tools_s <= 0:
        return 0.0
    run_s = trajectory.tools_s - trajectory.predicted_at_tools_s
    return max(0.0, said.tools_s - run_s)


def tools_left(trajectory: Trajectory, pace_s: float) -> float:
    """Tokens that take as long as the tool calls still to come; 0 when unknown."""
    return tools_left_s(trajectory) / pace_s


def demand_of(
    trajectory: Trajectory,
    count: int,
    pace_s: float | None,
    growth: float = 1.0,
    unseen_tokens: float = 0.0,
    most_tokens: float = math.inf,
) -> RemainingDemand:
    """The remaining demand of a trajectory, with at most `count` lengths (`remaining.remaining_lengths`).

    Parameters
    ----------
    pace_s
        Seconds per token; None: tools take no time.
    growth
        Context tokens added per generated token.
    unseen_tokens
        Estimated tokens that its running step has sampled (`running_step`).
    most_tokens
        The longest context that engines take: a trajectory ends there. One predicted length beyond it would keep an
        engine for itself, or postpone a deadline, for nothing.
    """
    tokens, lengths = remaining_lengths(trajectory, count, unseen_tokens)
    context, prompt = trajectory.context_tokens, trajectory.spec.prompt_tokens
    held = (context if context > prompt else prompt) + unseen_tokens
    room = most_tokens - held if most_tokens > held else 0.0
    if lengths[-1] > room:
        lengths = tuple([min(length, room) for length in lengths])
        tokens = min(tokens, sum(lengths) / len(lengths))
    tools_s = 0.0 if pace_s is None or tokens <= 0 else tools_left_s(trajectory)
    stretch = 1.0 if pace_s is None or tools_s <= 0 else 1.0 + tools_s / pace_s / tokens
    return RemainingDemand(tokens, lengths, stretch, held, growth, tools_s)
