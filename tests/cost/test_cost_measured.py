"""Measured tables: fitted, stored, refused for what they are not of."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import EngineCost, cost_from_mapping, engine_cost_for
from heddle_dask.cost.hardware import PER_PROMPT_S, ModelShape
from heddle_dask.cost.least_squares import non_negative_least_squares
from heddle_dask.cost.measured import BurstPoint, DecodePoint, MeasuredTable, MixedPoint, TokensPoint, table_names
from heddle_dask.cost.model_config import read_shape
from heddle_dask.cost.published import model_of
from heddle_dask.cost.table_fit import fit_table

BATCHES, CONTEXTS = (1, 2, 8, 32), (100, 1000, 8000)


def table_of(cost: EngineCost, shape: ModelShape, request_s: float = 0.0, **changes: Any) -> MeasuredTable:
    """What an engine of that cost measures, without noise."""
    values: dict[str, Any] = {
        "model": "a-model",
        "shape": shape,
        "degree": 1,
        "device": "a device",
        "engine": "an engine",
        "date": "2026-11-21",
        "slots": 32,
        "chunk_tokens": cost.chunk_tokens,
        "capacity_tokens": 500_000,
        "decode": tuple(
            DecodePoint(batch, batch * context, cost.decode_token_s(batch, batch * context))
            for batch, context in itertools.product(BATCHES, CONTEXTS)
        ),
        "prefill": tuple(TokensPoint(n, request_s + cost.prefill_s(n)) for n in (100, 1000, 3000, 8000)),
        "kv_transfer": (TokensPoint(1000, 0.011), TokensPoint(5000, 0.015)),
    }
    return MeasuredTable(**{**values, **changes})


DENSE = model_of("qwen3-8b")
COST = EngineCost(fixed_s=0.004, sequence_s=2e-4, context_token_s=3e-8, prefill_token_s=4e-5, capacity_tokens=500_000)
TABLE = table_of(COST, DENSE)

terms = st.builds(
    EngineCost,
    fixed_s=st.floats(1e-3, 0.1),
    sequence_s=st.floats(0, 1e-2),
    context_token_s=st.floats(0, 1e-6),
    prefill_token_s=st.floats(1e-6, 1e-3),
    chunk_tokens=st.integers(512, 8192),
)


# -- the fit ---------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(4, 12))
@settings(max_examples=60, deadline=None)
def test_least_squares_keep_every_coefficient_positive_and_no_neighbour_is_better(seed, columns, count):
    rng = np.random.default_rng(seed)
    rows, targets = rng.normal(size=(count, columns)), rng.normal(size=count)
    found = non_negative_least_squares(rows, targets)
    assert (found >= 0).all()
    slope = rows.T @ (rows @ found - targets)
    # Karush-Kuhn-Tucker: no term gains from growing, and none that is used from shrinking.
    assert (slope > -1e-8).all()
    assert np.abs(slope[found > 0]).max(initial=0.0) < 1e-8


@pytest.mark.parametrize("factor", [0.3, 4.0])
# The largest batches with the longest contexts have no neighbour that contradicts them.
@pytest.mark.parametrize("index", range(8))
def test_one_wild_point_does_not_pull_the_fit(index, factor):
    points = list(TABLE.decode)
    points[index] = replace(points[index], seconds=points[index].seconds * factor)
    found = fit_table(replace(TABLE, decode=tuple(points))).cost
    for batch, context in ((1, 2000), (8, 8000), (8, 64_000)):
        assert found.decode_token_s(batch, context) == pytest.approx(COST.decode_token_s(batch, context), rel=0.15)


@given(terms, st.floats(0, 0.05))
@settings(max_examples=50, deadline=None)
def test_a_fit_finds_the_cost_that_was_measured(cost, request_s):
    fit = fit_table(table_of(cost, DENSE, request_s))
    assert fit.decode_error_max < 1e-6
    assert fit.prefill_error_max < 1e-6
    assert fit.request_s == pytest.approx(request_s, abs=1e-6)
    for batch, context in ((1, 500), (16, 60_000)):
        assert fit.cost.decode_token_s(batch, context) == pytest.approx(cost.decode_token_s(batch, context))
    assert fit.cost.prefill_s(5000) == pytest.approx(cost.prefill_s(5000))


@given(terms, st.floats(0, 0.05), st.floats(0, 0.05))
@settings(max_examples=50, deadline=None)
def test_a_cached_step_tells_the_way_of_a_request_from_what_a_prompt_takes_in_the_engine(cost, request_s, prompt_s):
    cost = replace(cost, prompt_s=prompt_s, block_tokens=128, whole_prompts=True)
    cached = TokensPoint(257, request_s + cost.decode_token_s(1, 257))
    table = table_of(cost, DENSE, request_s, cached_step=cached, block_tokens=128, chunked_prefill=False, engines=2)
    fit = fit_table(MeasuredTable.from_mapping(json.loads(json.dumps(table.to_mapping()))))
    assert fit.prefill_error_max < 1e-6
    assert fit.request_s == pytest.approx(request_s, abs=1e-6)
    assert fit.cost.prompt_s == pytest.approx(prompt_s, abs=1e-6)
    assert (fit.cost.block_tokens, fit.cost.whole_prompts) == (128, True)


@given(terms, st.floats(0, 0.01), st.floats(1e-4, 0.01), st.floats(0, 0.05))
@settings(max_examples=50, deadline=None)
def test_many_prompts_tell_what_adds_up_from_what_a_prompt_alone_takes(cost, request_s, per_prompt_s, alone_s):
    cost = replace(cost, per_prompt_s=per_prompt_s)
    way_s = request_s + alone_s

    def burst_s(requests: int, cached: int, new: int) -> float:
        return way_s + requests * per_prompt_s + cost.prefill_s(requests * new, requests * cached)

    def beside_s(decoding: int, prompts: int) -> float:
        prompt_s = per_prompt_s + 64 * cost.prefill_token_s
        return 100 * cost.decode_token_s(decoding, 600 * decoding) + prompts * prompt_s

    table = table_of(
        cost,
        DENSE,
        way_s + per_prompt_s,
        cached_step=TokensPoint(33, request_s + cost.decode_token_s(1, 33)),
        bursts=tuple(BurstPoint(n, c, 64, burst_s(n, c, 64)) for n in (1, 8, 32) for c in (0, 1024)),
        mixed=tuple(
            MixedPoint(b, 600 * b, 100, n, 1024, 64, beside_s(b, n)) for b, n in ((16, 30), (16, 90), (48, 150))
        ),
    )
    fit = fit_table(MeasuredTable.from_mapping(json.loads(json.dumps(table.to_mapping()))))
    assert fit.prefill_error_max < 1e-5
    assert fit.cost.per_prompt_s == pytest.approx(per_prompt_s, rel=1e-3)
    assert (fit.request_s, fit.alone_s) == (pytest.approx(request_s, abs=1e-5), pytest.approx(alone_s, abs=1e-5))


def test_prompts_in_chunks_overlap_where_no_burst_was_measured():
    cached = TokensPoint(33, 0.005 + COST.decode_token_s(1, 33))
    fit = fit_table(table_of(COST, DENSE, 0.03, cached_step=cached))
    assert fit.prefill_error_max < 1e-6
    assert (fit.cost.prompt_s, fit.cost.per_prompt_s) == (0.0, PER_PROMPT_S)
    assert fit.alone_s == pytest.approx(0.025 - PER_PROMPT_S)


def test_a_table_that_does_not_say_means_small_blocks_chunks_and_one_engine():
    content = TABLE.to_mapping()
    for name in ("engines", "block_tokens", "chunked_prefill", "cached_step"):
        del content[name]
    table = MeasuredTable.from_mapping(content)
    assert table == TABLE and table.engines == 1
    cost = fit_table(table).cost
    assert (cost.block_tokens, cost.whole_prompts, cost.prompt_s) == (16, False, 0.0)


def test_a_fit_of_a_sparse_model_finds_the_weights_of_its_experts():
    shape = model_of("qwen3-30b-a3b")
    truth = engine_cost_for(shape, "h200")
    fit = fit_table(table_of(truth, shape))
    assert fit.decode_error_max < 1e-6
    assert fit.cost.spared_s == pytest.approx(truth.spared_s)
    assert fit.cost.expert_share == 8 / 128


def test_operators_get_what_no_kernel_takes_from_the_formula():
    kernels = EngineCost(fixed_s=0.004, context_token_s=3e-8, prefill_token_s=4e-5)
    fit = fit_table(table_of(kernels, DENSE, kind="operators"))
    assert fit.cost.fixed_s == pytest.approx(0.004 + 0.5e-3 + 36 * 20e-6)
    assert fit.cost.sequence_s == pytest.approx(25e-6)
    assert fit.cost.prefill_token_s == pytest.approx(4e-5, rel=1e-3)


def test_kv_transfers_are_a_line():
    fit = fit_table(TABLE)
    assert fit.kv_setup_s == pytest.approx(0.010)
    assert fit.kv_token_s == pytest.approx(1e-6)
    assert fit_table(replace(TABLE, kv_transfer=())).kv_token_s is None


# -- overriding the formula ------------------------------------------------------------------------------


def test_a_table_overrides_the_formula():
    cost = engine_cost_for("qwen3-8b", "h100", table=TABLE)
    assert cost.decode_token_s(8, 8000) == pytest.approx(COST.decode_token_s(8, 8000))
    assert cost.capacity_tokens == 500_000
    unknown = replace(TABLE, capacity_tokens=0)
    formula = engine_cost_for("qwen3-8b", "h100")
    assert engine_cost_for("qwen3-8b", "h100", table=unknown).capacity_tokens == formula.capacity_tokens


def test_a_table_of_another_model_or_degree_is_refused():
    with pytest.raises(BadInput, match=r"table is of another model \(a-model: layers 36, asked for 40\)"):
        engine_cost_for("qwen3-14b", "h100", table=TABLE)
    with pytest.raises(BadInput, match="table is of TP degree 1, asked for 2"):
        engine_cost_for("qwen3-8b", "h100", 2, table=TABLE)


def test_a_table_is_a_form_of_a_cost(tmp_path):
    path = tmp_path / "mine.json"
    TABLE.save(path)
    assert cost_from_mapping({"table": str(path)}) == fit_table(TABLE).cost
    with pytest.raises(BadInput, match=r"mine\.json is of TP degree 1, asked for 4"):
        cost_from_mapping({"table": str(path)}, 4)


# -- storage ---------------------------------------------------------------------------------------------


@given(terms)
@settings(max_examples=20, deadline=None)
def test_tables_survive_json(cost):
    table = table_of(cost, DENSE, start_s=3.5, conditions="quiet")
    assert MeasuredTable.from_mapping(json.loads(json.dumps(table.to_mapping()))) == table


def without(key: str) -> dict[str, Any]:
    content = TABLE.to_mapping()
    del content[key]
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"format": "csv"}, "is no engine table: its format is 'csv'"),
        ({**TABLE.to_mapping(), "version": 2}, "is of version 2: this program reads version 1"),
        ({**TABLE.to_mapping(), "colour": 1}, "has unknown key 'colour'"),
        (without("device"), "lacks 'device'"),
        ({**TABLE.to_mapping(), "date": "yesterday"}, "date is 'yesterday'"),
        ({**TABLE.to_mapping(), "degree": 3}, "TP degree 3 does not divide"),
        ({**TABLE.to_mapping(), "decode": []}, "too little to fit"),
        ({**TABLE.to_mapping(), "decode": [{"batch": 1}] * 2}, "a point is malformed"),
        ({**TABLE.to_mapping(), "prefill": [{"tokens": 5, "seconds": -1}]}, "seconds is -1"),
        ({**TABLE.to_mapping(), "prefill": [{"tokens": 0, "seconds": 1}]}, "tokens is 0"),
        ({**TABLE.to_mapping(), "kind": "guess"}, "kind 'guess' is unknown"),
        ({**TABLE.to_mapping(), "engines": 0}, "engines is 0"),
        ({**TABLE.to_mapping(), "block_tokens": 24}, "block_tokens is 24: use a multiple of 16"),
        ({**TABLE.to_mapping(), "chunked_prefill": "no"}, "chunked_prefill is 'no': use true or false"),
        ({**TABLE.to_mapping(), "cached_step": {"tokens": 257}}, "a point is malformed"),
        ({**TABLE.to_mapping(), "shape": {"layers": 1}}, "ModelShape lacks"),
    ],
)
def test_tables_that_are_none_are_named(tmp_path, content, message):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content, default=vars), encoding="utf-8")
    with pytest.raises(BadInput, match=message) as refused:
        MeasuredTable.load(path)
    assert "\n" not in str(refused.value)


def test_files_that_are_absent_or_no_json_are_named(tmp_path):
    with pytest.raises(BadInput, match=r"engine table none\.json: No such file"):
        MeasuredTable.load("none.json")
    (tmp_path / "x.json").write_text("{", encoding="utf-8")
    with pytest.raises(BadInput, match="is no JSON"):
        MeasuredTable.load(tmp_path / "x.json")
    with pytest.raises(BadInput, match="cannot write the table"):
        TABLE.save(tmp_path / "absent" / "x.json")


# -- what ships ------------------------------------------------------------------------------------------


def test_the_table_of_the_cpu_engine_ships(model_dir):
    assert "tiny-agent-cpu" in table_names()
    table = MeasuredTable.load("tiny-agent-cpu")
    table.check(read_shape(model_dir), 1)
    assert table.kind == "engine"
    assert table.slots >= 6
    cost = fit_table(table).cost
    assert 1e-4 < cost.decode_token_s(1, 100) < 0.1
    assert cost.decode_token_s(8, 800) > cost.decode_token_s(1, 100)
    assert cost_from_mapping({"table": "tiny-agent-cpu"}) == cost
    assert "/" not in table.device
    assert Path(table.model).name == table.model
