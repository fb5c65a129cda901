"""What the trajectories of a batch will ask for, as far as anybody knows before its first step.

Three sources, in this order: what is known beforehand (a replay), what earlier trajectories took, what a predictor
says of the prompts. The degrees depend on how lengths are spread, less on which trajectory is the long one. So the
lengths of earlier trajectories, or the two quantiles of a prediction, are spread evenly over the batch: trajectory i
stands at the quantile frac((i + 1/2)·φ), φ the golden ratio, which mixes short and long ones at every batch size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from heddle_dask.strategies.partition.work import Work

_GOLDEN = (math.sqrt(5) - 1) / 2
_Z90 = NormalDist().inv_cdf(0.9)


@dataclass(frozen=True, slots=True)
class Coming:
    """A trajectory that is about to start; `known_tokens` is 0 where nobody knows."""

    group: str
    prompt_tokens: int
    known_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Past:
    """What an earlier trajectory took: tokens it generated, tokens that tools added, seconds in tools."""

    decode_tokens: int
    observed_tokens: int = 0
    tool_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Guess:
    """Median and 0.9 quantile of the tokens that a trajectory will generate."""

    median_tokens: float
    q90_tokens: float

    def quantile_tokens(self, level: float) -> float:
        """The quantile, at least 1, of the log-normal law that has this median and 0.9 quantile."""
        median = max(1.0, self.median_tokens)
        spread = math.log(max(1.0, self.q90_tokens / median)) / _Z90
        return max(1.0, median * math.exp(spread * NormalDist().inv_cdf(min(max(level, 0.005), 0.995))))


def level_of(number: int) -> float:
    """Where trajectory `number` of a batch stands between 0 and 1: evenly for every count (Weyl's sequence)."""
    return math.modf((number + 0.5) * _GOLDEN)[0]


def works_of(
    coming: Sequence[Coming], past: Sequence[Past], guesses: Sequence[Guess], most_tokens: int
) -> tuple[list[Work], str]:
    """The work of each trajectory, and from which source; empty where nobody knows anything of one of them.

    Parameters
    ----------
    past
        Of earlier trajectories, in any order.
    guesses
        One per trajectory, or none.
    most_tokens
        No context grows longer.
    """
    works: list[Work] = []
    sources: dict[str, None] = {}
    by_length = sorted(past, key=lambda one: (one.decode_tokens, one.observed_tokens, one.tool_s))
    typical = by_length[len(by_length) // 2] if by_length else Past(0)
    for number, one in enumerate(coming):
        level = level_of(number)
        if one.known_tokens > 0:
            source, took = "known", Past(one.known_tokens, typical.observed_tokens, typical.tool_s)
        elif by_length:
            source, took = "earlier trajectories", by_length[int(level * len(by_length))]
        elif guesses:
            source, took = "predictor", Past(round(guesses[number].quantile_tokens(level)))
        else:
            return [], ""
        sources[source] = None
        works.append(_work(one, took, most_tokens))
    return works, " and ".join(sources)


def _work(one: Coming, took: Past, most_tokens: int) -> Work:
    prompt = min(one.prompt_tokens, most_tokens - 1)
    decode = max(1, min(took.decode_tokens, most_tokens - prompt))
    observed = max(0, min(took.observed_tokens, most_tokens - prompt - decode))
    return Work(
        group=one.group,
        decode_tokens=decode,
        # What tools add is there, on average, for half of its life.
        context_tokens=prompt + observed / 2,
        shared_tokens=prompt,
        prefill_tokens=observed,
        tool_s=took.tool_s,
    )
