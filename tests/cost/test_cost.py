"""The cost of engine iterations: properties that every engine body relies on."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import (
    EngineCost,
    cost_from_mapping,
    fixed_cost,
    load_profile,
    profile_names,
)

seconds = st.floats(0, 0.1)
costs = st.builds(
    EngineCost,
    fixed_s=st.floats(1e-6, 0.1),
    token_s=seconds,
    prefill_token_s=seconds,
    sequence_s=seconds,
    context_token_s=st.floats(0, 1e-5),
    chunk_tokens=st.integers(1, 8192),
)
batches = st.integers(0, 512)
contexts = st.integers(0, 10**6)
prompts = st.integers(0, 8192)


@given(costs, batches, contexts, prompts)
def test_an_iteration_never_gets_shorter_with_more_work(cost, batch, context, prompt):
    base = cost.iteration_s(batch, context, prompt)
    assert cost.iteration_s(batch + 1, context, prompt) >= base
    assert cost.iteration_s(batch, context + 1000, prompt) >= base
    assert cost.iteration_s(batch, context, prompt + 100) >= base


@given(costs, batches, contexts, prompts, st.integers(0, 50))
def test_a_span_is_the_sum_of_its_iterations(cost, batch, context, prompt, count):
    growth = batch + prompt
    total = sum(cost.iteration_s(batch, context + i * growth, prompt) for i in range(count))
    assert cost.span_s(count, batch, context, prompt) == pytest.approx(total)


@given(costs, batches, contexts, prompts, st.integers(0, 100_000), st.floats(0, 0.99))
def test_iterations_within_inverts_span(cost, batch, context, prompt, count, share):
    span = cost.span_s(count, batch, context, prompt)
    nxt = cost.span_s(count + 1, batch, context, prompt)
    found = cost.iterations_within(span + share * (nxt - span), batch, context, prompt)
    assert found in (count, count - 1, count + 1)
    assert cost.span_s(found, batch, context, prompt) <= span + share * (nxt - span)


@given(costs, st.integers(1, 20_000), st.integers(1, 20_000))
def test_prefill_never_gets_shorter_with_more_tokens(cost, fewer, extra):
    assert cost.prefill_s(fewer + extra) >= cost.prefill_s(fewer)


def test_fixed_cost_makes_steps_exact():
    cost = fixed_cost(0.01)
    assert cost.prefill_s(100_000) == pytest.approx(0.01)
    assert cost.span_s(99, 400, 10**6) + cost.prefill_s(5000) == pytest.approx(1.0)


def test_iterations_that_take_no_time_have_no_count():
    with pytest.raises(ValueError, match="takes no time"):
        fixed_cost(0.0).iterations_within(1.0, 1, 1)


@given(costs)
def test_costs_survive_json(cost):
    assert cost_from_mapping(json.loads(json.dumps(cost.to_mapping()))) == cost


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_loads(name):
    cost = load_profile(name, 2)
    assert cost.iteration_s(8, 8000) > 0
    assert cost.capacity_tokens > 50_000


def test_tiny_cpu_matches_what_was_measured():
    cost = load_profile("tiny-cpu")
    assert 1 / cost.iteration_s(1, 100) == pytest.approx(240, rel=0.05)
    assert 8 / cost.iteration_s(8, 800) == pytest.approx(1370, rel=0.08)
    assert 16 / cost.iteration_s(16, 1600) == pytest.approx(2300, rel=0.06)
    assert cost.prefill_s(3000) == pytest.approx(0.11, rel=0.1)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"profile": "nope"}, "cost profile 'nope' is unknown"),
        ({"profile": "tiny-cpu", "speed": 2}, "unknown key 'speed'"),
        ({"seconds_per_token": 0.1, "fixed_s": 1}, "unknown key 'fixed_s'"),
        ({"seconds_per_token": -1}, "fixed_s is -1"),
        ({"seconds_per_token": "fast"}, "use a number"),
        ({"fixed_s": float("inf")}, "fixed_s is inf"),
        ({"fixed_s": 1, "chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"token_s": 1}, "lacks fixed_s"),
        ({"model": {}}, "ModelShape lacks"),
    ],
)
def test_bad_costs_are_named(mapping, message):
    with pytest.raises(BadInput, match=message):
        cost_from_mapping(mapping)
