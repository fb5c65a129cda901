"""Forecast of the work of a batch before its first step.

Three sources, in this order: known lengths (a replay), the work of earlier trajectories, predictions from the
prompts. The TP degrees depend on the distribution of lengths more than on which trajectory is long. So the lengths of
earlier trajectories, or the two quantiles of a prediction, are spread evenly over the batch: trajectory i gets the
quantile frac((i + 1/2)·φ), with φ the golden ratio, which mixes short and long ones at every batch size.

A single value for each trajectory would hide the tail, which is the reason for large TP degrees: before the first
step a learned predictor knows little more than the prompt, so its medians are nearly equal. An exact prediction is
used unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from heddle_dask.core.nouns import DegreeRequest, FinishedWork
from heddle_dask.strategies.partition.work import Work

_GOLDEN = (math.sqrt(5) - 1) / 2
_Z90 = NormalDist().inv_cdf(0.9)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median and 0.9 quantile of the tokens that a trajectory will generate."""

    median_tokens: float
    q90_tokens: float

    def tokens(self, level: float) -> float:
        """The quantile, at least 1, of the log-normal distribution that has this median and 0.9 quantile."""
        median = max(1.0, self.median_tokens)
        spread = math.log(max(1.0, self.q90_tokens / median)) / _Z90
        return max(1.0, median * math.exp(spread * NormalDist().inv_cdf(min(max(level, 0.005), 0.995))))


def level_of(number: int) -> float:
    """Quantile level of trajectory `number` of a batch, in (0, 1), evenly spread for every count (Weyl sequence)."""
    return math.modf((number + 0.5) * _GOLDEN)[0]


def needs_prediction(request: DegreeRequest) -> bool:
    """Whether predictions are needed: there are no earlier trajectories, and not all lengths are known."""
    return not request.finished and min(request.known_tokens, default=0) <= 0


def forecast_works(request: DegreeRequest, predicted: Sequence[Quantiles]) -> tuple[list[Work], str]:
    """The work of each trajectory of the batch, and the sources; empty if the work of any trajectory is unknown.

    Parameters
    ----------
    predicted
        One per trajectory, or empty.
    """
    works: list[Work] = []
    sources: dict[str, None] = {}
    by_length = sorted(request.finished, key=lambda one: (one.decode_tokens, one.observation_tokens, one.tool_s))
    typical = by_length[len(by_length) // 2] if by_length else FinishedWork(0)
    for number, (spec, known) in enumerate(zip(request.trajectories, request.known_tokens, strict=True)):
        level = level_of(number)
        if known > 0:
            source, took = "known", FinishedWork(known, typical.observation_tokens, typical.tool_s)
        elif by_length:
            source, took = "earlier trajectories", by_length[int(level * len(by_length))]
        elif predicted:
            source, took = "predictor", FinishedWork(round(predicted[number].tokens(level)))
        else:
            return [], ""
        sources[source] = None
        works.append(_work(spec.group_id, spec.prompt_tokens, took, request.max_context_tokens))
    return works, " and ".join(sources)


def _work(group: str, prompt_tokens: int, took: FinishedWork, max_context_tokens: int) -> Work:
    prompt = min(prompt_tokens, max_context_tokens - 1)
    decode = max(1, min(took.decode_tokens, max_context_tokens - prompt))
    observed = max(0, min(took.observation_tokens, max_context_tokens - prompt - decode))
    return Work(
        group=group,
        decode_tokens=decode,
        # An observation is part of the context for half of the trajectory's life on average.
        context_tokens=prompt + observed / 2,
        shared_tokens=prompt,
        prefill_tokens=observed,
        tool_s=took.tool_s,
    )
