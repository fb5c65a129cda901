"""How long measurements take, computed before, and the plan that ends in time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.cost.engine_cost import EngineCost, engine_cost_for
from heddle_dask.cost.measured import DecodePoint, TokensPoint
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.profiling.duration import MeasuredEngine, cost_of_points, duration_told, plan_within
from heddle_dask.profiling.engines import LIMIT_S
from heddle_dask.profiling.plan import ProfilePlan, plan_for

ON_H100 = engine_cost_for("qwen3-8b", "h100")
ROWS = Path(__file__).parents[2] / "benchmarks" / "gpu" / "2026-11-26" / "8b-rows.jsonl"


@pytest.mark.parametrize("slots", [8, 64, 128, 256, 512])
@pytest.mark.parametrize("context", [4096, 40_960])
def test_an_8b_model_on_an_h100_is_measured_in_three_minutes(slots: int, context: int) -> None:
    engine = MeasuredEngine(ON_H100, slots, context, 393_072)
    asked = plan_for(slots, context)
    plan = plan_within(asked, engine, LIMIT_S)
    assert engine.duration_s(plan) <= LIMIT_S == 180
    assert engine.decode_points(plan) >= 12 and plan.repeats >= 2
    if (slots, context) == (8, 4096):
        assert plan == asked, "what is asked for without options fits as it is"


def test_the_computed_duration_is_that_of_a_measurement_on_an_h100() -> None:
    """Two contexts, five batches, twice each: `at_s` is when a point was done."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    decode = [row for row in rows if row["what"] == "decode"][:10]
    (before,) = (row for row in rows if row["what"] == "cached_step")
    measured_s = decode[-1]["at_s"] - before["at_s"]
    plan = ProfilePlan((1, 8, 32, 64, 128), (256, 2048), (1,), 24, 2)
    nothing_else = replace(plan, contexts=())
    engine = MeasuredEngine(ON_H100, 128, 16_384, 393_072)
    assert engine.duration_s(plan) - engine.duration_s(nothing_else) == pytest.approx(measured_s, rel=0.15)


@given(
    slots=st.integers(1, 600),
    context=st.integers(200, 100_000),
    repeats=st.integers(1, 20),
    scale=st.floats(0.01, 1000),
    limit_s=st.floats(0.1, 1000),
    chunked=st.booleans(),
)
def test_a_smaller_plan_keeps_the_least_and_the_largest_sizes(
    slots: int, context: int, repeats: int, scale: float, limit_s: float, chunked: bool
) -> None:
    asked = plan_for(slots, context, repeats=repeats)
    engine = MeasuredEngine(ON_H100.scaled(scale), slots, context, 0, chunked)
    plan = plan_within(asked, engine, limit_s)
    plan.check(EngineSpec("emulated", "m", slots=slots, max_model_len=context))
    for got, of in ((plan.batches, asked.batches), (plan.contexts, asked.contexts), (plan.prompts, asked.prompts)):
        assert set(got) <= set(of) and (got[0], got[-1]) == (of[0], of[-1]) and list(got) == sorted(set(got))
    assert plan.repeats <= asked.repeats and plan.tokens <= asked.tokens
    fits = engine.duration_s(plan) <= limit_s
    assert fits or (len(plan.batches) <= 2 and len(plan.contexts) <= 2 and plan.repeats == 1)
    assert plan == asked or engine.duration_s(asked) > limit_s
    told = duration_told(plan, asked, engine, limit_s)
    assert told.startswith("measuring takes about ") and ("--time-limit" in told) == (plan != asked or not fits)


def test_the_first_points_are_a_cost() -> None:
    truth = EngineCost(0.004, prefill_token_s=3e-5, sequence_s=2e-4)
    decode = [DecodePoint(batch, 0, truth.decode_token_s(batch, 0)) for batch in (1, 8)]
    found = cost_of_points(decode, TokensPoint(1000, truth.prefill_s(1000)))
    assert found.decode_token_s(8, 0) == pytest.approx(truth.decode_token_s(8, 0))
    assert found.prefill_s(2000) == pytest.approx(truth.prefill_s(2000), rel=0.05)
    assert cost_of_points(decode[:1], TokensPoint(1, 0.001)).fixed_s == decode[0].seconds
