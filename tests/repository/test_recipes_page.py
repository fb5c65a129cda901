"""The recipes: their figures are those of the rows, and their memory is that of the cost model."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from heddle_dask.cli.group_cluster import check_plan
from heddle_dask.cli.main import heddle
from heddle_dask.cli.rollout.run import Outcome
from heddle_dask.cli.train import run
from heddle_dask.cli.train.order import TrainOrder
from heddle_dask.cost.engine_cost import gpu_of, model_of
from heddle_dask.cost.hardware import kv_capacity_tokens
from heddle_dask.cost.published import config_of
from heddle_dask.cost.training_memory import TrainedModel, TrainerSetup, trainer_bytes
from heddle_dask.engines.defaults import shipped_model
from heddle_dask.live.clusters.slurm.cluster_file import cluster_plan

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "recipes"
PAGE = (RECIPES / "rollouts.md").read_text(encoding="utf-8")
ROWS = [json.loads(line) for line in (ROOT / "benchmarks" / "plan_recipes.jsonl").read_text().splitlines()]

TRAININGS = dict(
    zip(
        ("one-gpu", "one-node", "slurm"),
        map(json.loads, (ROOT / "benchmarks" / "plan_training.jsonl").read_text().splitlines()),
        strict=True,
    )
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["conditions"]["model"])
def test_steps_per_second_are_those_of_the_rows(row: dict) -> None:
    times = "\N{MULTIPLICATION SIGN}"
    chosen = [budget["chosen"] for budget in row["budgets"]]
    cells = [
        "-" if one is None else f"{one['engines']} {times} TP {one['degrees'][0]}: {one['steps_per_s']:.1f}"
        for one in chosen
    ]
    assert f"| {row['conditions']['model']} | {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize("name", [row["conditions"]["model"] for row in ROWS])
def test_memory_is_that_of_the_cost_model(name: str) -> None:
    (line,) = re.findall(rf"^\| `Qwen/{name}` \|.*$", PAGE, re.MULTILINE | re.IGNORECASE)
    model, told = model_of(name), line.split("|")[4].split(", ")
    assert f"{model.weight_bytes / 1e9:.1f} GB" in line
    for tp, text in zip((1, 2, 4, 8), told, strict=True):
        tokens = kv_capacity_tokens(model, gpu_of("h100"), tp)
        number, _, unit = text.strip().partition(" ")
        if unit not in ("k", "M"):
            assert text.strip() == "too little for a context" and tokens < 32_768
        else:
            assert float(number) * {"k": 1e3, "M": 1e6}[unit] == pytest.approx(tokens, rel=0.04)


@pytest.mark.parametrize("name", TRAININGS)
def test_memory_and_minutes_of_a_training_are_those_of_its_row(name: str) -> None:
    page, row = (RECIPES / f"{name}.md").read_text(encoding="utf-8"), TRAININGS[name]
    training = row["training"]
    needed, states = (training["bytes_on_each_gpu"][part] / 1e9 for part in ("needed_memory_bytes", "states"))
    assert f"| {needed:.1f} GB: {states:.1f} of weights" in page
    assert f"{training['bytes_on_each_gpu']['activations'] / 1e9:.1f} of activations | computed |" in page
    assert f"{training['most_pass_tokens']:,} tokens | computed |" in page
    trajectories = f"| rollout of {training['batch']} trajectories ({training['batch_tokens'] / 1e3:,.0f} k tokens)"
    (rolled,) = [line for line in page.splitlines() if line.startswith(trajectories)]
    assert f"| {training['rollout_s'] / 60:.1f} min | simulated |" in rolled
    assert (
        f"| their training step | {training['trainer_s'] / 60:.1f} min | computed, at a quarter of the peak |" in page
    )
    assert re.search(rf"^\| a step.* {training['step_s'] / 60:.1f} min", page, re.MULTILINE)
    if name != "one-gpu":
        assert f"| a step, `sync` | at least {training['in_turn_s'] / 60:.1f} min" in page
    saved = training["saved_bytes"]["--lora 32"] if name == "slurm" else min(training["saved_bytes"].values())
    assert f"saves {saved / 1e9:.1f} GB" in page


@pytest.mark.parametrize("name", TRAININGS)
def test_memory_of_the_rows_is_that_of_the_formula(name: str) -> None:
    row = TRAININGS[name]
    setup = TrainerSetup(
        ranks=row["training"]["trainer_gpus"],
        lora_rank=32 if name == "one-gpu" else 0,
        pass_tokens=row["training"]["pass_tokens"],
    )
    found = trainer_bytes(TrainedModel.of_config(config_of(row["conditions"]["model"])), setup)
    for part, told in row["training"]["bytes_on_each_gpu"].items():
        assert round(getattr(found, part)) == told, "print the rows again: benchmarks/README.md"


@pytest.mark.parametrize("name", TRAININGS)
def test_a_recipe_has_at_most_500_words(name: str) -> None:
    assert len((RECIPES / f"{name}.md").read_text(encoding="utf-8").split()) <= 500


@pytest.mark.parametrize("name", TRAININGS)
def test_the_commands_of_a_training_are_orders_with_the_planned_trainer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[TrainOrder] = []

    def ordered(order: TrainOrder, *, to_stderr: bool) -> Outcome:
        orders.append(order)
        return Outcome({}, 0)

    monkeypatch.setattr(run, "run_training", ordered)
    monkeypatch.chdir(tmp_path)
    models = tmp_path / "models"
    models.mkdir()
    for model in ("Qwen3-8B", "Qwen3-14B"):
        (models / model).symlink_to(shipped_model())
    row = TRAININGS[name]["training"]
    lines = [line for line in command_lines(name) if line.startswith("heddle train")]
    for line in lines:
        words = shlex.split(line.replace("/project", str(tmp_path)))
        done = CliRunner().invoke(heddle, words[1:])
        assert done.exit_code == 0, (line, done.output)
        order = orders[-1]
        assert order.trainer["ranks"] == row["trainer_gpus"]
        assert order.trainer.get("lora_rank", 0) == (32 if name == "one-gpu" else 0)
        assert order.rule.groups * order.groups.members == row["batch"]
        assert order.rollout["max_context_tokens"] == row["pass_tokens"]
        if name == "one-node":
            assert (order.rollout["engines"], order.rollout["tp_degrees"]) == (row["tp_degree"], str(row["tp_degree"]))
    assert len(lines) == 1


def command_lines(name: str) -> list[str]:
    text = (RECIPES / f"{name}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_the_cluster_file_of_a_training_is_a_plan() -> None:
    text = (RECIPES / "slurm.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```toml[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    plan = cluster_plan(tomllib.loads(block))
    check_plan(plan, Path("train.toml"), frozenset())
    assert [group.role for group in plan.groups.values()] == ["rollout", "trainer", "tool"]
    rollout = plan.groups["gpu"]
    row = TRAININGS["slurm"]["training"]
    assert rollout.tp_degree == row["tp_degree"] and rollout.maximum * rollout.engines == row["engines"]


def test_the_node_says_what_engines_of_one_gpu_take() -> None:
    row = TRAININGS["one-node"]
    (four,) = [budget["candidates"] for budget in row["budgets"] if budget["gpus"] == 4]
    (single,) = [one["makespan_s"] for one in four if one["degrees"] == [1] * 4]
    rollout_s = single * row["training"]["batch"] / row["conditions"]["trajectories"]
    in_turn_s = rollout_s + row["training"]["trainer_s"]
    page = (RECIPES / "one-node.md").read_text(encoding="utf-8")
    assert f"| the same, four engines of TP 1 | {rollout_s / 60:.1f} min | simulated |" in page
    assert f"({rollout_s / 60:.1f} with TP 1)" in page
    assert f"({in_turn_s / 60:.1f} with TP 1)" in page
