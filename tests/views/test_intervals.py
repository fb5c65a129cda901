"""Means of open intervals over cells, against a sum over every pair."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.views.report.intervals import Intervals, counts_by_cell, edges_of

_spans = st.lists(st.tuples(st.floats(-20, 120), st.floats(0, 60), st.floats(0, 9)), max_size=20)


@given(_spans, st.integers(1, 9))
def test_means_are_those_of_the_overlaps(spans: list[tuple[float, float, float]], cells: int) -> None:
    intervals = Intervals()
    for start, length, weight in spans:
        intervals.add(start, start + length, weight)
    edges = edges_of(100.0, cells)
    expected = [
        sum(max(0.0, min(start + length, hi) - max(start, lo)) * weight for start, length, weight in spans) / (hi - lo)
        for lo, hi in itertools.pairwise(edges)
    ]
    assert intervals.means(edges).tolist() == pytest.approx(expected, abs=1e-6)
    assert intervals.total() == pytest.approx(sum(length * weight for _, length, weight in spans), abs=1e-6)


def test_nothing_and_an_axis_of_no_length() -> None:
    assert Intervals().means(edges_of(10.0, 4)).tolist() == [0.0] * 4 and Intervals().total() == 0.0
    intervals = Intervals()
    intervals.add(0.0, 0.0)
    assert len(intervals) == 0
    intervals.add(0.0, 1.0)
    assert np.isfinite(intervals.means(edges_of(0.0, 3))).all()


def test_counts() -> None:
    assert counts_by_cell([0.0, 0.5, 9.9, 11.0], edges_of(10.0, 2)).tolist() == [2.0, 1.0]
