"""Bootstrap intervals against closed forms and brute force."""

import itertools
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.learning.gains import difference_over_runs
from heddle_dask.training.intervals import bootstrap_mean, paired_difference

_VALUES = st.lists(st.floats(-5, 5), min_size=1, max_size=4)


@given(_VALUES)
def test_the_interval_is_that_of_all_resamples(values: list[float]) -> None:
    found = bootstrap_mean(values, seed=1, draws=4000)
    exact = np.sort([np.mean(each) for each in itertools.product(values, repeat=len(values))])
    assert found.mean == pytest.approx(np.mean(values))
    # Between quantiles a little further out and in: 4,000 draws leave some error.
    assert _quantile(exact, 0.005, "lower") <= found.low <= _quantile(exact, 0.07, "higher")
    assert _quantile(exact, 0.93, "lower") <= found.high <= _quantile(exact, 0.995, "higher")


def _quantile(values: npt.NDArray[np.float64], share: float, side: Literal["lower", "higher"]) -> float:
    slack = 1e-9 if side == "higher" else -1e-9
    return float(np.quantile(values, share, method=side)) + slack


@given(_VALUES, st.integers(0, 5))
def test_the_same_seed_gives_the_same_interval(values: list[float], seed: int) -> None:
    assert bootstrap_mean(values, seed=seed, draws=50) == bootstrap_mean(values, seed=seed, draws=50)


def test_pairing_takes_the_difficulty_of_tasks_out() -> None:
    before = {f"task-{i}": float(i % 2) for i in range(40)}
    after = {name: value + 0.1 for name, value in before.items()} | {"only-after": 1.0}
    change = paired_difference(before, after)
    assert change.bounds == pytest.approx((0.1, 0.1))
    # Without pairing, the spread of the tasks would hide it.
    assert bootstrap_mean(list(before.values())).high > bootstrap_mean([after[name] for name in before]).low


def test_an_interval_over_runs_is_wider_than_one_over_tasks() -> None:
    tasks = [f"task-{i}" for i in range(30)]
    before = dict.fromkeys(tasks, 0.0)
    runs = [(before, dict.fromkeys(tasks, gain)) for gain in (0.0, 0.1, 0.2)]
    over_runs = difference_over_runs(runs)
    assert over_runs.mean == pytest.approx(0.1)
    # Tasks do not differ, so the interval is that of three runs drawn with repetition: 27 equally likely means.
    means = np.sort([np.mean(each) for each in itertools.product((0.0, 0.1, 0.2), repeat=3)])
    assert over_runs.bounds == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.04)
    assert paired_difference(*runs[1]).bounds == pytest.approx((0.1, 0.1))


def test_nothing_to_compare_raises() -> None:
    with pytest.raises(ValueError, match="no values"):
        paired_difference({"a": 1.0}, {"b": 1.0})
    with pytest.raises(ValueError, match="no runs"):
        difference_over_runs([])
