"""Fits with non-negative coefficients, for up to about 8 terms."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray


def non_negative_least_squares(rows: NDArray[np.float64], targets: NDArray[np.float64]) -> NDArray[np.float64]:
    """The non-negative coefficients that minimise ``|rows @ coefficients - targets|``.

    The optimum is the ordinary least-squares solution on its non-zero terms. So it is the best ordinary solution
    without a negative coefficient over all subsets of terms: exact, and fast for up to about 8 terms. Columns are
    scaled first, since seconds per token and seconds per iteration differ by many powers of ten.
    """
    terms = rows.shape[1]
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = rows / scale
    best, best_error = np.zeros(terms), float(targets @ targets)
    for used in chain.from_iterable(combinations(range(terms), count) for count in range(1, terms + 1)):
        columns = scaled[:, used]
        found = np.linalg.lstsq(columns, targets, rcond=None)[0]
        if (found < 0).any():
            continue
        gap = columns @ found - targets
        error = float(gap @ gap)
        if error < best_error * (1 - 1e-12):
            best, best_error = np.zeros(terms), error
            best[list(used)] = found
    coefficients: NDArray[np.float64] = best / scale
    return coefficients


def non_negative_least_deviations(
    rows: NDArray[np.float64], targets: NDArray[np.float64], *, floor: float = 1e-3, rounds: int = 30
) -> NDArray[np.float64]:
    """Non-negative coefficients with a small sum of absolute deviations, which is robust against outliers.

    Iteratively reweighted least squares: each row is weighted by the inverse of its last deviation, bounded by `floor`.
    Exact up to `floor`, and equal to least squares if these fit exactly.
    """
    found = non_negative_least_squares(rows, targets)
    for _ in range(rounds):
        weights = 1.0 / np.sqrt(np.maximum(np.abs(rows @ found - targets), floor))
        found = non_negative_least_squares(rows * weights[:, None], targets * weights)
    return found
