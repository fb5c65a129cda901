"""Many intervals of time, and how many of them are open on average in each cell of an axis.

Exact and fast for a million intervals: sorted ends and prefix sums, no loop over cells.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Intervals:
    """Intervals in seconds, each with a weight: 1, or what it holds (CPUs, tokens)."""

    def __init__(self) -> None:
        self._starts = array("d")
        self._stops = array("d")
        self._weights = array("d")

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start_s: float, stop_s: float, weight: float = 1.0) -> None:
        """Add one; an empty one is dropped."""
        if stop_s > start_s:
            self._starts.append(start_s)
            self._stops.append(stop_s)
            self._weights.append(weight)

    def means(self, edges: Floats) -> Floats:
        """Mean weight of the open intervals in each cell between two neighbouring edges, which ascend."""
        if not len(self):
            return np.zeros(len(edges) - 1)
        starts, stops, weights = self._arrays()
        until = _area_after(starts, weights, edges) - _area_after(stops, weights, edges)
        cells: Floats = np.diff(until) / np.maximum(np.diff(edges), 1e-300)
        # Differences of large sums: what is 0 may come out as a rounding error.
        cells[np.abs(cells) < 1e-9 * max(1.0, float(np.abs(weights).sum()))] = 0.0
        return cells

    def _arrays(self) -> tuple[Floats, ...]:
        return tuple(np.frombuffer(each, np.float64) for each in (self._starts, self._stops, self._weights))

    def total(self) -> float:
        starts, stops, weights = self._arrays()
        return float(((stops - starts) * weights).sum()) if len(self) else 0.0


def _area_after(points: Floats, weights: Floats, edges: Floats) -> Floats:
    """Sum over the points before each edge of weight times distance to the edge."""
    order = np.argsort(points, kind="stable")
    points, weights = points[order], weights[order]
    before = np.searchsorted(points, edges, side="left")
    sum_of_weights = np.concatenate(([0.0], np.cumsum(weights)))[before]
    sum_of_moments = np.concatenate(([0.0], np.cumsum(weights * points)))[before]
    area: Floats = edges * sum_of_weights - sum_of_moments
    return area


def edges_of(until_s: float, cells: int) -> Floats:
    return np.linspace(0.0, max(until_s, 1e-9), cells + 1)


def counts_by_cell(times_s: Sequence[float], edges: Floats) -> Floats:
    counts, _ = np.histogram(np.asarray(times_s, np.float64), bins=edges)
    return counts.astype(np.float64)
