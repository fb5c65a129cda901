"""Scores of predictions: recall of the long tail, correlation, error, coverage, and makespan by list scheduling."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.row_file import Row
from heddle_dask.predictors.features import Floats

LONG_SHARE = 0.2


def rounded_row(figures: Mapping[str, float | str]) -> Row:
    """The JSON form of a row: three digits, and nan becomes null."""
    return {
        name: value if isinstance(value, str | int) else None if math.isnan(value) else round(value, 3)
        for name, value in figures.items()
    }


def score(done: Floats, total: Floats, median: Floats, q90: Floats) -> dict[str, float]:
    """Compare predictions of log(1 + remaining) with the truth; nan where a score is undefined (constant, no quantile).

    Parameters
    ----------
    done, total
        Tokens so far, and total tokens.
    median, q90
        Predicted quantiles of the log of the remaining tokens.
    """
    truth = np.log1p(total - done)
    predicted = done + np.expm1(median)
    return {
        "recall": long_recall(predicted, total),
        "pearson": _correlation(np.log1p(predicted), np.log1p(total)),
        "rank": _correlation(ranks(predicted), ranks(total)),
        "error": float(np.mean(np.abs(median - truth))),
        "coverage": float(np.mean(truth <= q90 + 1e-9)),
    }


def long_recall(predicted: Floats, total: Floats) -> float:
    """Share of the truly longest fifth that is in the predicted longest fifth; nan for constant predictions."""
    if len(total) < 5 or np.ptp(predicted) == 0:
        return float("nan")
    count = max(round(LONG_SHARE * len(total)), 1)
    long = set(np.argsort(-total, kind="stable")[:count].tolist())
    said = np.argsort(-predicted, kind="stable")[:count].tolist()
    return sum(index in long for index in said) / count


def ranks(values: Floats) -> Floats:
    """Ranks from 0, ties at their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    starts = np.cumsum(counts) - counts
    return np.asarray((starts + (counts - 1) / 2)[inverse], dtype=np.float64)


def _correlation(left: Floats, right: Floats) -> float:
    if len(left) < 3 or np.ptp(left) == 0 or np.ptp(right) == 0:
        return float("nan")
    return float(np.corrcoef(left, right)[0, 1])


def makespan(steps: Sequence[Sequence[float]], scores: Sequence[Sequence[float]], slots: int) -> float:
    """Run jobs step by step on `slots`; a free slot takes the waiting job with the largest score.

    Parameters
    ----------
    steps
        Lengths of each job's steps.
    scores
        Score of each job before each of its steps; ties by position.
    """
    waiting = [(-scores[job][0], job, 0) for job in range(len(steps))]
    heapq.heapify(waiting)
    running: list[tuple[float, int, int]] = []
    now = 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            _, job, step = heapq.heappop(waiting)
            heapq.heappush(running, (now + steps[job][step], job, step))
        now, job, step = heapq.heappop(running)
        if step + 1 < len(steps[job]):
            heapq.heappush(waiting, (-scores[job][step + 1], job, step + 1))
    return now
