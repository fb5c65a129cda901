"""`heddle profile`: a known engine is measured as what it is, and operators without one."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from click.testing import CliRunner, Result

from heddle_dask.cli.one_line import OneLineGroup
from heddle_dask.cli.profile import profile
from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import load_profile
from heddle_dask.cost.measured import MeasuredTable
from heddle_dask.cost.model_config import read_shape
from heddle_dask.cost.table_fit import fit_table
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.profiling.engines import model_name
from heddle_dask.profiling.plan import ProfilePlan, plan_for
from heddle_dask.profiling.sweep import all_busy


def invoke(*arguments: object) -> Result:
    group = OneLineGroup("heddle")
    group.add_command(profile)
    return CliRunner().invoke(group, ["profile", *map(str, arguments)])


def refused(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def test_the_emulated_engine_is_measured_as_what_it_is(tmp_path, model_dir):
    out = tmp_path / "table.json"
    result = invoke(
        *("--model", model_dir, "--engine", "emulated", "--slots", 4, "--max-context-tokens", 600),
        *("--tokens", 24, "--repeats", 2, "--out", out, "--json"),
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert len(result.stdout.splitlines()) == 1
    table = MeasuredTable.load(out)
    assert table.shape == read_shape(model_dir)
    assert (table.engine, table.degree, table.slots) == ("emulated", 1, 4)
    assert (table.engines, table.block_tokens, table.chunked_prefill) == (1, 16, True)
    assert table.cached_step is not None and table.cached_step.tokens == 33
    assert {point.batch for point in table.decode} == {1, 2, 3, 4}
    assert [(point.requests, point.cached_tokens, point.new_tokens) for point in table.bursts] == [
        *((1, 0, 64), (4, 0, 64)),
        *((1, 0, 512), (4, 0, 512)),
    ]
    assert table.mixed == (), "a context of 600 tokens is too short for these prompts"
    assert told["out"] == str(out)
    assert told["points"] == len(table.decode) == 12
    truth, found = load_profile("tiny-cpu"), fit_table(table).cost
    # Wide: other work on the machine lengthens what a client sees.
    assert found.decode_token_s(1, 100) == pytest.approx(truth.decode_token_s(1, 100), rel=0.5)
    assert found.decode_token_s(4, 400) > found.decode_token_s(1, 100)
    assert found.chunk_tokens == truth.chunk_tokens
    assert "error of the fit" in result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("measuring takes about "))
    assert line.endswith(" s: 12 batches and contexts, 3 prompts, 2 repeats, 24 tokens each")
    assert refused("--model", model_dir, "--engine", "emulated", "--out", out).startswith(
        f"heddle: {out} exists: choose another --out"
    )


def test_prompts_beside_decoding_sequences_tell_what_adds_up(tmp_path, model_dir):
    """The emulated engine charges a prompt nothing but its tokens and its iteration."""
    out = tmp_path / "table.json"
    result = invoke(
        *("--model", model_dir, "--engine", "emulated", "--slots", 8, "--max-context-tokens", 2000),
        *("--tokens", 24, "--repeats", 1, "--out", out, "--time-limit", 0.1),
    )
    assert result.exit_code == 0, result.output
    table = MeasuredTable.load(out)
    assert [(point.decoding, point.cached_tokens, point.new_tokens) for point in table.mixed] == [
        *((2, 1024, 64), (2, 1024, 64)),
        *((6, 1024, 64), (6, 1024, 64)),
    ]
    assert all(point.prompts >= 0 and point.seconds > 0 for point in table.mixed)
    assert {point.cached_tokens for point in table.bursts} == {0, 1024}
    assert fit_table(table).cost.prompt_s == 0.0
    assert {point.batch for point in table.decode} == {1, 8} and len(table.prefill) == 2
    assert "; the fewest points take longer than --time-limit 0.1\n" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--engine", "magic"), "--engine magic: use vllm, emulated, operators"),
        (("--engine", "emulated", "--profile", "nope"), "cost profile 'nope' is unknown"),
        (
            ("--engine", "emulated", "--tp-degree", 3),
            "TP degree 3 does not divide the model's 4 attention heads",
        ),
        (("--engine", "emulated", "--model", "absent"), "model directory absent does not exist"),
        (("--engine", "emulated", "--max-context-tokens", 40), "128 tokens to decode leave no context of 40"),
        (("--engine", "emulated", "--out", "no/such/x.json"), "cannot write the table to no/such/x.json"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(*arguments)


def test_plans_reach_the_slots_and_the_longest_context():
    plan = plan_for(10, 4096)
    assert plan.batches == (1, 2, 3, 4, 6, 8, 10)
    assert plan.contexts == (64, 256, 1024, 3968)
    assert plan.contexts_to_move() == plan.contexts
    spec = EngineSpec("emulated", "m", slots=10, max_model_len=4096)
    plan.check(spec)
    with pytest.raises(BadInput, match="batch of 10 exceeds 8 slots"):
        plan.check(EngineSpec("emulated", "m", slots=8, max_model_len=4096))
    with pytest.raises(BadInput, match="5128 tokens of context and answer exceed the engine's 4096"):
        ProfilePlan((1,), (5000,), (100,)).check(spec)
    assert model_name("a/b/checkpoint") == "b"
    assert model_name("a/b") == "b"


def test_engines_measured_at_once_are_said_to_be_several(tmp_path, model_dir):
    out = tmp_path / "table.json"
    result = invoke(
        *("--model", model_dir, "--engine", "emulated", "--engines", 2, "--slots", 2),
        *("--max-context-tokens", 200, "--tokens", 24, "--repeats", 2, "--out", out, "--json"),
    )
    assert result.exit_code == 0, result.output
    table = MeasuredTable.load(out)
    assert table.engines == json.loads(result.stdout)["engines"] == 2
    assert "of 2 engines at once" in table.conditions
    assert "; 2 engines at once" in result.stderr


def test_an_engine_that_is_done_stays_busy_until_all_are():
    async def play() -> tuple[list[float], list[tuple[int, int]]]:
        rounds = [asyncio.Event() for _ in range(40)]
        done: list[tuple[int, int]] = []

        async def piece(engine: int, repeat: int) -> float:
            if engine == 1:  # the slow one: each of its pieces takes three of the other's
                await rounds[3 * repeat + 2].wait()
            else:
                await asyncio.sleep(0)
                rounds[repeat].set()
            done.append((engine, repeat))
            return 10.0 * engine + repeat

        return await all_busy(2, piece, 3, first=1), done

    seconds, done = asyncio.run(play())
    assert seconds == [1.0, 2.0, 11.0, 12.0]
    assert sum(engine == 0 for engine, _ in done) >= 9


def test_kv_transfers_between_two_engines_are_measured(tmp_path, model_dir):
    out = tmp_path / "table.json"
    result = invoke(
        *("--model", model_dir, "--engine", "emulated", "--slots", 1, "--max-context-tokens", 600),
        *("--tokens", 24, "--repeats", 1, "--out", out, "--kv-transfer", "--device", "a desk"),
    )
    assert result.exit_code == 0, result.output
    table = MeasuredTable.load(out)
    assert [point.tokens for point in table.kv_transfer] == [64, 256, 568]
    assert table.device == "a desk"
    assert "KV transfer: " in result.stdout
    assert fit_table(table).kv_token_s is not None


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_real_engine_is_measured(tmp_path, model_dir):
    out = tmp_path / "table.json"
    result = invoke(
        *("--model", model_dir, "--engine", "vllm", "--slots", 2, "--max-context-tokens", 400),
        *("--tokens", 16, "--repeats", 1, "--out", out),
    )
    assert result.exit_code == 0, result.output
    table = MeasuredTable.load(out)
    assert table.engine.startswith("vllm")
    assert table.block_tokens % 32 == 0 and not table.chunked_prefill
    assert table.capacity_tokens > 10_000
    assert table.start_s > 1
    assert fit_table(table).cost.decode_token_s(1, 100) > 1e-4


# -- operators with torch alone --------------------------------------------------------------------------


def operators(*arguments: object) -> Result:
    pytest.importorskip("torch")
    return invoke("--engine", "operators", "--torch-device", "cpu", *arguments)


SMALL = ("--slots", 4, "--max-context-tokens", 64, "--repeats", 3)


@pytest.mark.parametrize("degree", [1, 2])
def test_operators_of_a_small_model_on_a_cpu(tmp_path, model_dir, degree):
    out = tmp_path / "tiny.json"
    result = operators("--model", model_dir, "--tp-degree", degree, *SMALL, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    table = MeasuredTable.load(out)
    assert (table.kind, table.degree, table.device) == ("operators", degree, "CPU")
    assert (table.shape, table.model) == (read_shape(model_dir), model_name(model_dir))
    assert [(point.batch, point.context_tokens) for point in table.decode] == [(1, 64), (4, 256)]
    assert [point.tokens for point in table.prefill] == [64]
    assert all(table.whole_s(point) > point.seconds for point in table.decode), "what is no kernel is added"
    assert fit_table(table).cost.fixed_s > 0.5e-3
    told = json.loads(result.stdout)
    assert (told["points"], told["out"]) == (2, str(out))
    assert "of kernels on one GPU" in result.stderr


def test_a_published_name_needs_no_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = operators("--model", "qwen3-8b", "--tp-degree", 8, "--slots", 2, *SMALL[2:4], "--repeats", 1)
    assert result.exit_code == 0, result.output
    assert MeasuredTable.load("qwen3-8b-tp8.json").shape.layers == 36


def test_operators_plan_reaches_the_slots_and_the_longest_context():
    module = pytest.importorskip("heddle_dask.profiling.operators")
    plan = module.operators_plan()
    assert plan.batches == (1, 8, 16, 32, 64, 128, 256)
    assert (plan.contexts, plan.prompts) == ((512, 2048, 8192, 32_768), (128, 512, 2048))
    plan = module.operators_plan(10, 1000)
    assert (plan.batches, plan.contexts, plan.prompts) == ((1, 8, 10), (512, 1000), (128, 512, 1000))


def test_operators_of_a_tiny_mixture_of_experts(tmp_path):
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    out = tmp_path / "moe.json"
    assert operators("--model", tmp_path, *SMALL, "--out", out).exit_code == 0
    assert MeasuredTable.load(out).shape.expert_share == 0.25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tp-degree", 3), "TP degree 3 does not divide the model's 4 attention heads: use 1, 2, 4"),
        (("--torch-device", "abacus"), "--torch-device abacus: use "),
        (("--torch-device", "cuda:99"), "--torch-device cuda:99: use "),
        (
            ("--kv-transfer",),
            "--engine operators starts no engine: leave out --engines, --kv-transfer, --dtype, --time-limit and "
            "options of GPUs",
        ),
        (("--model", "gpt-9"), "model 'gpt-9' is unknown"),
    ],
)
def test_operators_refuse_bad_input_in_one_line(arguments, message, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    assert message in refused("--engine", "operators", "--torch-device", "cpu", *arguments)


def test_without_torch_operators_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "heddle_dask.profiling.operators", raising=False)
    monkeypatch.delattr("heddle_dask.profiling.operators", raising=False)
    assert "--engine operators needs torch: `pip install torch`" in refused("--engine", "operators")
