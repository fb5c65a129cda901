"""Boosted trees: the start has its own, and a batch of both kinds is answered as each row alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.predictors.tree_arrays import TreeArrays
from heddle_dask.predictors.trees import FEW_ROWS, MIN_ROWS, TreeRows, Trees, TreeSettings, grow_trees

SETTINGS = TreeSettings(rounds=40, start_rounds=40, start_depth=3, depth=3, learning_rate=0.2)


def _rows(first: int, later: int) -> TreeRows:
    """The first column tells the start's target, the second that of later rows, which are ten times as many."""
    draws = np.random.default_rng(1)
    count = first + later
    features = draws.random((count, 6)).astype(np.float32)
    start = np.arange(count) < first
    target = np.where(start, features[:, 0] > 0.5, 5.0 + (features[:, 1] > 0.5)) + 0.01 * draws.random(count)
    return TreeRows(features, target, np.zeros(count, dtype=bool), start)


def test_the_start_is_told_by_trees_of_its_own() -> None:
    rows = _rows(200, 2000)
    trees = grow_trees(rows, SETTINGS)
    assert trees is not None and trees.start is not None
    steps = np.where(rows.first, 0, 3)
    median = trees.log_remaining(rows.features, steps)[0]
    assert np.abs(median - rows.target)[rows.first].mean() < 0.05
    assert np.abs(median - rows.target)[~rows.first].mean() < 0.05
    common = Trees(trees.any_step, None).log_remaining(rows.features, steps)[0]
    assert np.abs(common - rows.target)[rows.first].mean() > 1, "nothing in the columns says which rows are first"


@pytest.mark.parametrize("steps", [[0, 0, 0, 0], [1, 2, 3, 4], [0, 2, 0, 1]])
def test_a_batch_is_answered_as_each_row_alone(steps: list[int]) -> None:
    rows = _rows(100, 300)
    trees = grow_trees(rows, SETTINGS)
    assert trees is not None
    features, done = rows.features[98:102], np.array(steps)
    alone = [trees.log_remaining(features[i : i + 1], done[i : i + 1])[:, 0] for i in range(4)]
    assert np.array_equal(trees.log_remaining(features, done), np.array(alone).T)


def test_few_rows_grow_none() -> None:
    assert grow_trees(_rows(0, MIN_ROWS - 1), SETTINGS) is None
    without_start = grow_trees(_rows(MIN_ROWS - 1, MIN_ROWS), SETTINGS)
    assert without_start is not None and without_start.start is None


values = st.one_of(st.just(float("nan")), st.floats(-1.0, 2.0, width=32), st.sampled_from([0.0, 0.5, 1.0]))


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.lists(st.lists(values, min_size=4, max_size=4), min_size=1, max_size=FEW_ROWS + 6),
)
@settings(max_examples=60, deadline=None)
def test_arrays_answer_as_xgboost(seed: int, depth: int, asked: list[list[float]]) -> None:
    """Bit by bit, with missing values in training and in questions, and with values that are bounds."""
    draws = np.random.default_rng(seed)
    features = np.round(draws.random((120, 4)), draws.integers(1, 4)).astype(np.float32)
    target = draws.normal(size=120) + 3.0 * features[:, 0]
    features[draws.random(features.shape) < 0.2] = np.nan
    trees = grow_trees(
        TreeRows(features, target, np.zeros(120, dtype=bool), np.zeros(120, dtype=bool)),
        replace(SETTINGS, rounds=12, depth=depth, seed=seed % 1000),
    )
    assert trees is not None
    arrays = TreeArrays.of(trees.any_step)
    used = arrays.bound[arrays.value == 0.0]
    for rows in (np.array(asked, dtype=np.float32), np.resize(used, (40, 4)), features):
        assert np.array_equal(arrays.ask(rows), trees.any_step.inplace_predict(rows))


def test_trees_without_a_split_are_answered_too() -> None:
    rows = _rows(0, 40)
    trees = grow_trees(replace(rows, target=np.ones(40)), SETTINGS)
    assert trees is not None
    arrays = TreeArrays.of(trees.any_step)
    for count in (1, 2, 7, 40):
        few = rows.features[:count]
        assert np.array_equal(arrays.ask(few), trees.any_step.inplace_predict(few))
    assert arrays.depth == 0
