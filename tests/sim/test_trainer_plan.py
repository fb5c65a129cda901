"""GPUs of a trainer beside its engines: `sim.trainer_plan` by hand, and ``heddle plan --train``."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.cli.main import heddle
from heddle_dask.cli.plan.training import TrainRequest
from heddle_dask.core.errors import BadInput
from heddle_dask.cost.hardware import kv_capacity_tokens
from heddle_dask.cost.published import config_of, gpu_of, model_of
from heddle_dask.cost.training_memory import PEAK_SHARE, TrainedModel, TrainerSetup, train_step_s, trainer_bytes
from heddle_dask.sim.clusters import CLUSTERS
from heddle_dask.sim.trainer_plan import BatchTokens, TrainerPlan
from heddle_dask.workloads.choice import load_workload

H100 = gpu_of("h100")
EIGHT = TrainerPlan(
    name="qwen3-8b",
    model=TrainedModel.of_config(config_of("qwen3-8b")),
    setup=TrainerSetup(pass_tokens=32_768),
    gpu=H100,
    gpus=8,
    gpus_per_node=8,
)


def test_full_8b_has_room_from_three_gpus_on_and_leaves_one_to_the_engines() -> None:
    # 16 bytes of 8.19e9 parameters: 65.5 GB on two GPUs beside 28 GB, 43.7 GB on three.
    assert EIGHT.fitting() == [3, 4, 5, 6, 7]
    assert EIGHT.rollout_gpus(EIGHT.fitting()) == [1, 2, 4, 5]


def test_the_trainer_stays_within_a_node() -> None:
    assert replace(EIGHT, gpus=16).fitting() == [3, 4, 5, 6, 7, 8]
    assert replace(EIGHT, gpus=16).rollout_gpus([3, 4, 8]) == [8, 13]
    assert replace(EIGHT, gpus=32).fitting() == [8], "whole nodes"
    assert replace(EIGHT, gpus=32).rollout_gpus([8]) == [24]


def test_full_8b_on_one_gpu_is_refused_and_an_adapter_shares_it() -> None:
    alone = replace(EIGHT, gpus=1)
    with pytest.raises(
        BadInput, match=r"needs 180 GB on each of 1 GPU of 80 GB: --lora 32 \(47 GB\), or 3 GPUs"
    ) as told:
        replace(alone, setup=TrainerSetup(pass_tokens=34_000)).fitting()
    assert "\n" not in str(told.value)
    adapter = replace(alone, setup=TrainerSetup(lora_rank=32, pass_tokens=16_384))
    assert adapter.fitting() == [1] == adapter.rollout_gpus([1])
    # 35.6 of 80 GB are the trainer's.
    assert adapter.engine_memory_share() == 0.55


def test_a_long_context_is_refused_with_the_longest_that_fits() -> None:
    small = replace(EIGHT, gpus=4, setup=TrainerSetup(lora_rank=32, pass_tokens=131_072))
    with pytest.raises(BadInput, match="use passes of at most 104,448 tokens"):
        small.fitting()


@given(st.integers(1, 8), st.sampled_from([0, 32]), st.integers(1024, 65_536))
def test_what_a_change_saves_is_what_the_formula_says(ranks: int, lora: int, tokens: int) -> None:
    setup = TrainerSetup(ranks=ranks, lora_rank=lora, pass_tokens=tokens)
    plan = replace(EIGHT, setup=setup)
    saved = plan.savings(ranks)
    assert list(saved.values()) == sorted(saved.values(), reverse=True)
    now = trainer_bytes(plan.model, setup).total
    halved = trainer_bytes(plan.model, replace(setup, pass_tokens=tokens // 2)).total
    assert saved[f"passes of {tokens // 2:,} tokens"] == now - halved
    assert ("--lora 32" in saved) == (lora == 0)
    assert ("one GPU more for the trainer" in saved) == (ranks < 8)


def test_tokens_of_a_batch_are_the_mean_of_the_drawn_ones() -> None:
    drawn = load_workload("math", trajectories=32, samples=16, seed=0, max_context_tokens=40_960)
    batch = BatchTokens.of(drawn, 64)
    lengths = [one.context_tokens for one in drawn]
    assert batch.tokens == 2 * sum(lengths)
    assert batch.squared == 2 * sum(length**2 for length in lengths)
    asked = EIGHT.on(4, batch)
    assert asked.step_s == train_step_s(EIGHT.model, replace(EIGHT.setup, ranks=4), H100, batch.tokens, batch.squared)
    assert PEAK_SHARE == 0.25


# -- the command ------------------------------------------------------------------------------------------


def plan(*options: str) -> dict[str, object]:
    words = ["plan", "--train", "--workload", "math", "--model", "qwen3-8b", "--seeds", "1", "--batch", "16", "--json"]
    done = CliRunner().invoke(heddle, [*words, *options])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_eight_gpus_are_split_by_the_simulated_rollout_and_the_computed_step() -> None:
    told = plan("--gpus", "8", "--max-context-tokens", "32768")
    training, split = told["training"], told["split"]
    assert [one["trainer_gpus"] for one in split["tried"]] == [3, 4, 5, 6, 7]
    least = min(one["step_s"] for one in split["tried"])
    assert training["step_s"] <= 1.01 * least
    assert training["step_s"] == pytest.approx(max(training["rollout_s"], training["trainer_s"]), abs=0.01)
    assert training["in_turn_s"] == pytest.approx(training["rollout_s"] + training["trainer_s"], abs=0.01)
    ranks = training["trainer_gpus"]
    assert training["engines"] * training["tp_degree"] <= 8 - ranks
    needs = trainer_bytes(EIGHT.model, replace(EIGHT.setup, ranks=ranks))
    assert training["bytes_on_each_gpu"]["states"] == round(16 * 8_190_735_360 / ranks)
    assert training["bytes_on_each_gpu"]["needed_memory_bytes"] == round(needs.needed_memory_bytes) < 80e9
    assert all(len(set(one["degrees"])) == 1 for budget in told["budgets"] for one in budget["candidates"])


def test_one_gpu_is_shared_and_its_engine_has_what_the_trainer_leaves() -> None:
    told = plan("--gpus", "1", "--lora", "32", "--max-context-tokens", "16384")
    training = told["training"]
    assert training["engine_memory_share"] == 0.55
    # vLLM's share of 80 GB less weights and 2 GB of workspace, at 147,456 bytes a token.
    assert training["kv_tokens"] == int((0.55 * 80e9 - 2e9 - 16_381_470_720) // 147_456)
    assert training["kv_tokens"] < kv_capacity_tokens(model_of("qwen3-8b"), H100, 1)
    assert training["step_s"] == training["in_turn_s"]


def test_options_of_the_trainer_count() -> None:
    asked = {"lora": None, "batch": None, "overlap": "async", "total_gpus": None}

    def setup(*options: str, lora: int | None = None) -> TrainerSetup:
        told = {**asked, "lora": lora, "trainer_set": options}
        return TrainRequest.of("qwen3-8b", [8], CLUSTERS["hopper8"], 4096, told).plan.setup

    assert setup() == TrainerSetup()
    assert setup("micro_batch_tokens=2048").pass_tokens == 4096, "the longest sequence"
    assert setup("dtype=float32", "gradient_checkpointing=false") == TrainerSetup(item_bytes=4, recompute=False)
    assert setup("passes=2", "kl_coefficient=0.1") == TrainerSetup(reference=True, passes=2, forwards=2)
    assert setup("parts=2", lora=8) == TrainerSetup(lora_rank=8, forwards=1)
    assert setup("kl_coefficient=0.1", lora=8) == TrainerSetup(lora_rank=8, forwards=1)


def test_measured_seconds_of_the_trainer_take_the_place_of_computed_ones() -> None:
    told = plan("--gpus", "8", "--max-context-tokens", "32768", "--trainer-s", "800/gpus")
    training = told["training"]
    assert training["trainer_s"] == pytest.approx(800 / training["trainer_gpus"], abs=0.01)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpus", "1"), "training qwen3-8b (all weights, passes of 40,960 tokens) needs 180 GB on each of 1 GPU"),
        (("--gpus", "4,8"), "--gpus names 2 numbers: with --train give one"),
        (("--gpus", "8", "--total-gpus", "8"), "--total-gpus is of --trainer-s"),
        (("--gpus", "8", "--trainer", "speed=2"), "--trainer speed=2: use KEY=VALUE"),
        (("--gpus", "8", "--trainer", "ranks=4"), "--trainer ranks and shares_gpus are what --train plans"),
        (("--model", "qwen3-30b-a3b"), "training a mixture of experts is not modelled"),
    ],
)
def test_what_cannot_be_planned_is_one_line(options: tuple[str, ...], said: str) -> None:
    words = ["plan", "--train", "--workload", "math", "--model", "qwen3-8b", "--cluster", "hopper8", *options]
    done = CliRunner().invoke(heddle, words)
    assert done.exit_code == 2
    assert said in done.output
    assert done.output.count("\n") == 1


def test_options_of_a_training_without_train_are_refused() -> None:
    done = CliRunner().invoke(heddle, ["plan", "--workload", "math", "--lora", "8"])
    assert done.exit_code == 2
    assert "--lora and --trainer are of --train" in done.output
