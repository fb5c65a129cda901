"""The distribution of the growth of contexts, and the KV use that it forecasts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.cost.context_growth import (
    GROWTH_TOKENS,
    ContextForecast,
    DomainGrowth,
    GrowthCounts,
    GrowthLaw,
    prior_hazard,
)

growth_tokens = st.floats(0.0, 50_000.0, allow_nan=False)
several = st.lists(growth_tokens, max_size=40)


def law_of(ended: list[float], running: list[float], doubt: float = 0.0) -> GrowthLaw:
    return GrowthLaw(GrowthCounts.of(ended, running), prior_hazard(200.0), doubt)


@given(several, several, st.floats(0.0, 3.0))
def test_survival_begins_at_one_and_never_rises(
    ended: list[float], running: list[float], doubt: float
) -> None:
    survival = law_of(ended, running, doubt).survival
    assert np.all(survival[:, 0] == 1.0)
    assert np.all(np.diff(survival, axis=1) <= 0) and np.all(survival >= 0)


@given(several, several)
def test_doubt_makes_contexts_longer(ended: list[float], running: list[float]) -> None:
    sure, unsure = law_of(ended, running).survival, law_of(ended, running, 1.0).survival
    assert np.all(unsure >= sure - 1e-12)


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


def forecast_of(
    domains: dict[str, DomainGrowth], capacities: tuple[float, ...] = (1e6,), spread: float = 1.0
) -> ContextForecast:
    return ContextForecast(domains, capacities, 40_000.0, 100.0, doubt=1.0, spread=spread)


def room(domains: dict[str, DomainGrowth]) -> int:
    """How many new trajectories of the domain `b` fit."""
    forecast = forecast_of(domains)
    count = 0
    while forecast.best_engine("b", 100.0) == (0, True):
        forecast.add("b", 100.0, 0)
        count += 1
    return count


@given(several, st.lists(st.tuples(growth_tokens, st.integers(1, 2_000)), max_size=20), st.integers(1, 2_000))
def test_the_use_is_at_least_what_is_held_and_at_most_the_longest_contexts(
    ended: list[float], alive: list[tuple[float, int]], prompt: int
) -> None:
    contexts = [growth + first for growth, first in alive]
    domain = DomainGrowth(ended, (), [growth for growth, _ in alive], contexts, [0] * len(alive))
    forecast = forecast_of({"x": domain}, (1.0,), 0.0)
    (before,) = forecast.shares()
    assert sum(contexts) - 1e-6 <= before <= sum(max(40_000.0, c) for c in contexts) * 1.2 + 1e-6
    forecast.add("new", float(prompt), 0)
    assert forecast.shares()[0] >= before


@given(several, st.lists(st.integers(50_000, 500_000), min_size=1, max_size=4))
def test_what_is_added_while_it_fits_stays_within_every_capacity(
    ended: list[float], capacities: list[int]
) -> None:
    forecast = forecast_of({"x": DomainGrowth(ended)}, tuple(map(float, capacities)))
    for _ in range(200):
        engine, fits = forecast.best_engine("x", 300.0)
        if not fits:
            break
        forecast.add("x", 300.0, engine)
        assert forecast.shares().max() <= 1.0


def test_a_new_one_goes_where_contexts_will_be_short_not_where_they_are() -> None:
    """One engine holds a context that hardly any trajectory exceeds, the other two that have just begun."""
    ended = [2_000.0] * 50 + [10_000.0] * 50
    domain = DomainGrowth(ended, (), [9_900.0, 0.0, 0.0], [10_000.0, 100.0, 100.0], [0, 1, 1])
    assert forecast_of({"x": domain}, (1e6, 1e6)).best_engine("x", 100.0) == (0, True)


def test_a_domain_with_few_ends_is_taken_for_like_all_others() -> None:
    """With its own ends it goes its own way."""
    known = DomainGrowth([200.0] * 300)
    alike, other = DomainGrowth(), DomainGrowth([20_000.0] * 100)
    assert room({"a": known, "b": alike}) > 3 * room({"a": known, "b": other})


def test_what_runs_tells_before_anything_has_ended() -> None:
    assert room({"b": DomainGrowth(cut=[9_000.0] * 50)}) < 0.7 * room({"b": DomainGrowth()})
