"""The distribution of the growth of contexts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.cost.context_forecast import (
    GROWTH_TOKENS,
    GrowthCounts,
    GrowthLaw,
    prior_hazard,
)

growth_tokens = st.floats(0.0, 50_000.0, allow_nan=False)
several = st.lists(growth_tokens, max_size=40)


def law_of(ended: list[float], running: list[float], doubt: float = 0.0) -> GrowthLaw:
    return GrowthLaw(GrowthCounts.of(ended, running), prior_hazard(2_000.0), doubt)


@given(several, several, st.floats(0.0, 3.0))
def test_survival_begins_at_one_and_never_rises(ended: list[float], running: list[float], doubt: float) -> None:
    survival = law_of(ended, running, doubt).survival
    assert np.all(survival[:, 0] == 1.0)
    assert np.all(np.diff(survival, axis=1) <= 0) and np.all(survival >= 0)


@given(several, several)
def test_doubt_makes_contexts_longer(ended: list[float], running: list[float]) -> None:
    sure, unsure = law_of(ended, running).survival, law_of(ended, running, 1.0).survival
    assert np.all(unsure >= sure - 1e-12)


def test_before_any_has_ended_growth_is_exponential() -> None:
    law = GrowthLaw(GrowthCounts.of([], []), prior_hazard(2_000.0), 0.0)
    assert law.survival[0] == pytest.approx(np.exp(-GROWTH_TOKENS / 2_000.0), abs=0.05)


@given(several, several)
def test_each_trajectory_is_counted_once(ended: list[float], running: list[float]) -> None:
    counts = GrowthCounts.of(ended, running)
    assert counts.ends.sum() == len(ended)
    assert np.all(np.diff(counts.reached) <= 0), "who reaches a bin has reached those before"
    assert np.all(counts.ends <= counts.reached) and counts.reached[0] <= len(ended) + len(running)


def test_many_observations_give_their_distribution_and_cut_ones_are_not_ends() -> None:
    rng = np.random.default_rng(0)
    growth = rng.exponential(4_000.0, 5_000)
    cut = rng.exponential(4_000.0, 5_000)
    seen = growth <= cut
    law = law_of(growth[seen].tolist(), cut[~seen].tolist(), 1.0)
    inside = (GROWTH_TOKENS > 500) & (GROWTH_TOKENS < 8_000)
    assert law.survival[0][inside] == pytest.approx(np.exp(-GROWTH_TOKENS[inside] / 4_000.0), abs=0.03)
