"""The KV use that trajectories will reach: bounds, brute force over which of them run, and the choice of an engine."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.cost.context_forecast import (
    GROWTH_TOKENS,
    ContextForecast,
    DomainGrowth,
    GrowingContext,
    GrowthCounts,
    GrowthLaw,
    bin_of,
    prior_hazard,
)

MOST_TOKENS = 40_000.0
MEAN_GROWTH = 10_000.0  # before any has ended
growth_tokens = st.floats(0.0, 50_000.0, allow_nan=False)
several = st.lists(growth_tokens, max_size=40)


def forecast_of(
    domains: dict[str, DomainGrowth], capacities: tuple[float, ...] = (1e6,), spread: float = 1.0
) -> ContextForecast:
    return ContextForecast(domains, capacities, MOST_TOKENS, MEAN_GROWTH, doubt=1.0, spread=spread)


def room(domains: dict[str, DomainGrowth], group: str = "", prompt: float = 100.0) -> int:
    """How many new trajectories of the domain `b` fit; of one group, or each of its own."""
    forecast = forecast_of(domains)
    count = 0
    while forecast.best_engine("b", prompt, group or str(count)) == (0, True):
        forecast.add("b", prompt, group or str(count), 0)
        count += 1
    return count


def on_engine(*live: tuple[float, float, str], engine: int = 0) -> list[GrowingContext]:
    """Growth, first prompt and group of each."""
    return [GrowingContext(growth, growth + prompt, engine, group) for growth, prompt, group in live]


@given(several, st.lists(st.tuples(growth_tokens, st.integers(1, 2_000)), max_size=20), st.integers(1, 2_000))
def test_the_use_is_at_least_what_is_held_and_at_most_the_longest_contexts(
    ended: list[float], alive: list[tuple[float, int]], prompt: int
) -> None:
    live = on_engine(*[(growth, float(first), str(n)) for n, (growth, first) in enumerate(alive)])
    contexts = [each.context_tokens for each in live]
    forecast = forecast_of({"x": DomainGrowth(ended, (), live)}, (1.0,), 0.0)
    (before,) = forecast.shares()
    assert sum(contexts) - 1e-6 <= before <= sum(max(MOST_TOKENS, c) for c in contexts) * 1.2 + 1e-6
    forecast.add("new", float(prompt), "other", 0)
    assert forecast.shares()[0] >= before - 1e-6


def brute_force(law: GrowthLaw, live: list[GrowingContext], spread: float) -> float:
    """The largest use over all horizons, from every set of trajectories that may still run."""
    most = 0.0
    for horizon, ahead in enumerate(GROWTH_TOKENS):
        chance = []
        for each in live:
            within = each.context_tokens + ahead <= MOST_TOKENS
            survives = float(law.survival[bin_of(np.array([each.growth]))[0], horizon])
            chance.append(1.0 if not horizon else survives if within else 0.0)
        mean = square = 0.0
        for runs in itertools.product((False, True), repeat=len(live)):
            probability = math.prod(p if alive else 1 - p for p, alive in zip(chance, runs, strict=True))
            use, prompts = 0.0, {}
            for each, alive in zip(live, runs, strict=True):
                if alive:
                    prompts[each.group] = each.context_tokens - each.growth
                    use += each.growth + ahead
            use += sum(prompts.values())
            mean += probability * use
            square += probability * use**2
        most = max(most, mean + spread * math.sqrt(max(0.0, square - mean**2)))
    return most


@given(
    several,
    st.lists(st.tuples(st.floats(0.0, 8_000.0), st.sampled_from("abc")), min_size=1, max_size=5),
    st.lists(st.sampled_from("abc"), max_size=2),
    st.floats(0.0, 2.0),
)
def test_it_equals_brute_force_over_which_trajectories_run(
    ended: list[float], alive: list[tuple[float, str]], added: list[str], spread: float
) -> None:
    """Groups share their first prompt; trajectories that are added later count as those that were there."""
    prompts = {"a": 50.0, "b": 900.0, "c": 6_000.0}
    live = on_engine(*[(growth, prompts[group], group) for growth, group in alive])
    forecast = forecast_of({"x": DomainGrowth(ended, (), live)}, (1.0,), spread)
    for group in added:
        forecast.add("x", prompts[group], group, 0)
    law = GrowthLaw(GrowthCounts.of(ended, [each.growth for each in live]), prior_hazard(MEAN_GROWTH), 1.0)
    live += on_engine(*[(0.0, prompts[group], group) for group in added])
    assert forecast.shares()[0] == pytest.approx(brute_force(law, live, spread), rel=1e-6)


@given(several, st.lists(st.integers(50_000, 500_000), min_size=1, max_size=4), st.integers(1, 20))
def test_what_is_added_while_it_fits_stays_within_every_capacity(
    ended: list[float], capacities: list[int], groups: int
) -> None:
    forecast = forecast_of({"x": DomainGrowth(ended)}, tuple(map(float, capacities)))
    for number in range(200):
        group = str(number % groups)
        engine, fits = forecast.best_engine("x", 300.0, group)
        if not fits:
            break
        forecast.add("x", 300.0, group, engine)
        assert forecast.shares().max() <= 1.0 + 1e-9


def test_a_new_one_goes_where_contexts_will_be_short_not_where_they_are() -> None:
    """One engine holds a context that hardly any trajectory exceeds, the other two that have just begun."""
    live = on_engine((9_900.0, 100.0, "a")) + on_engine((0.0, 100.0, "b"), (0.0, 100.0, "c"), engine=1)
    domain = DomainGrowth([2_000.0] * 50 + [10_000.0] * 50, (), live)
    assert forecast_of({"x": domain}, (1e6, 1e6)).best_engine("x", 100.0, "d") == (0, True)


def test_a_shared_prompt_counts_once_until_the_last_of_its_group_ends() -> None:
    """Of 20,000 tokens, beside a growth of 200."""
    known = {"b": DomainGrowth([200.0] * 300)}
    apart, together = room(known, prompt=20_000.0), room(known, "one", 20_000.0)
    assert apart < 60 and together > 20 * apart
    live = on_engine((0.0, 20_000.0, "a")) + on_engine((0.0, 1_000.0, "b"), engine=1)
    forecast = forecast_of({"b": DomainGrowth([200.0] * 300, (), live)}, (1e6, 1e6))
    assert forecast.best_engine("b", 20_000.0, "a") == (0, True)
    assert forecast.best_engine("b", 20_000.0, "other") == (1, True)
    assert (forecast.holds(0, "a"), forecast.holds(1, "a"), forecast.holds(0, "other")) == (True, False, None)


def test_a_domain_with_few_ends_is_taken_for_like_all_others() -> None:
    """With its own ends it goes its own way."""
    known = DomainGrowth([200.0] * 300)
    alike, other = DomainGrowth(), DomainGrowth([20_000.0] * 100)
    assert room({"a": known, "b": alike}) > 3 * room({"a": known, "b": other})


def test_what_runs_tells_before_anything_has_ended() -> None:
    assert room({"b": DomainGrowth(cut=[9_000.0] * 50)}) < 0.7 * room({"b": DomainGrowth()})


def test_other_runs_hold_memory_and_teach_nothing() -> None:
    own = DomainGrowth([200.0] * 100)
    shared = DomainGrowth([200.0] * 100, (), [], on_engine(*[(9_000.0, 100.0, str(n)) for n in range(50)]))
    assert forecast_of({"b": shared}).mean_growth("b") == forecast_of({"b": own}).mean_growth("b")
    assert forecast_of({"b": own}).shares()[0] == 0.0
    assert forecast_of({"b": shared}).shares()[0] >= 50 * 9_100 / 1e6


@given(several, st.lists(st.tuples(st.floats(0.0, 8_000.0), st.sampled_from("abc")), max_size=5))
def test_fits_says_of_each_engine_what_best_engine_says_of_the_best(
    ended: list[float], alive: list[tuple[float, str]]
) -> None:
    live = on_engine(*[(growth, 900.0, group) for growth, group in alive])
    forecast = forecast_of({"x": DomainGrowth(ended, (), live)}, (30_000.0, 20_000.0))
    engine, fits = forecast.best_engine("x", 900.0, "a")
    assert forecast.fits("x", 900.0, "a", engine) == fits
    assert fits or not forecast.fits("x", 900.0, "a", 1 - engine)
