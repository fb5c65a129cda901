"""``python -m benchmarks passes``: how passes are dealt, how a policy moves on, and the report."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.command import bench
from benchmarks.pass_makespans import PREDICTORS, PassWorkload, makespan_tables, predictors_named
from benchmarks.predictor_passes import deal_passes, drift_of, drifted
from heddle_dask.predictors.from_steps import PastStep, PastTrajectory


def past(name: str, key: str) -> PastTrajectory:
    return PastTrajectory(name, key, "d", 0, 10, False, [PastStep(100), PastStep(200)], prompt_key=key)


@given(st.lists(st.sampled_from("abcd"), max_size=30), st.integers(0, 9))
def test_every_attempt_is_in_one_pass_and_later_prompts_are_earlier_ones_too(keys: list[str], seed: int) -> None:
    attempts = [past(str(number), key) for number, key in enumerate(keys)]
    earlier, later = deal_passes(attempts, seed)
    names = [one.trajectory_id for one in (*earlier, *later)]
    assert sorted(names) == sorted(one.trajectory_id for one in attempts)
    assert {one.prompt_key for one in later} <= {one.prompt_key for one in earlier}
    assert deal_passes(attempts, seed) == (earlier, later)


def test_a_policy_moves_on_by_one_factor_for_each_prompt() -> None:
    first, second, other = drifted([past("1", "a"), past("2", "a"), past("3", "b")], 1.5, seed=3)
    assert [step.generated_tokens for step in first.steps] == [step.generated_tokens for step in second.steps]
    assert other.steps[0].generated_tokens != first.steps[0].generated_tokens
    logs = [math.log(drift_of(str(number), 1.5, 0)) for number in range(500)]
    spread = math.sqrt(sum(each * each for each in logs) / len(logs))
    assert spread == pytest.approx(math.log(1.5), rel=0.1)


def test_passes_of_a_synthetic_workload_share_prompts_and_nothing_else() -> None:
    earlier, later = PassWorkload("search", 24, 4, 32_768).passes(seed=5)
    assert len(earlier) == len(later) == 24
    assert {one.prompt_key for one in earlier} == {one.prompt_key for one in later}
    assert not {one.group_id for one in earlier} & {one.group_id for one in later}
    assert not {one.trajectory_id for one in earlier} & {one.trajectory_id for one in later}
    assert replace(later[0], prompt_key="").prompt_key == ""


def repeated(path: Path) -> Path:
    rng = random.Random(1)
    lines = []
    for group in range(30):
        usual = rng.randint(1, 12)
        for trial in range(4):
            step = {"gen_tokens": 20, "obs_tokens": 5, "tool": "bash", "tool_s": 0.1}
            lines.append(
                {
                    "id": f"{group}-{trial}",
                    "group": f"g{group}",
                    "prompt_tokens": 50,
                    "complete": True,
                    "steps": [step] * (usual + rng.randint(0, 1)),
                }
            )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
@pytest.mark.long
def test_history_knows_what_nothing_else_does(tmp_path: Path) -> None:
    path, cluster = repeated(tmp_path / "trace.jsonl"), tmp_path / "cluster.toml"
    cluster.write_text('gpus = 1\ngpu = "h100"\ngpus-per-node = 1\ntp = 1\nslots = 4\n')
    arguments = ["passes", "--trace", str(path), "--makespan", str(path), "--cluster", str(cluster), "--json"]
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout.splitlines()[-1])
    (file,) = made["files"]
    first = {row["history"]: row["within"] for row in file["rows"] if row["steps_finished"] == 0}
    assert first["same policy"] > 0.8
    assert first["none"] is None or abs(first["none"]) < 0.3
    assert all(row["context"] == row["context_by_all"] for row in file["rows"] if row["history"] == "none")
    assert [row["predictor"] for row in made["rows"]] == list(PREDICTORS)
    assert {(row["arm"], row["completed"], row["rolled_out"]) for row in made["rows"]} == {("heddle", 60, 60)}


def test_stored_runs_are_not_run_again_and_add_to_the_table(tmp_path: Path) -> None:
    cluster, out = tmp_path / "cluster.toml", tmp_path / "rows.jsonl"
    cluster.write_text('gpus = 2\ngpu = "h100"\ngpus-per-node = 2\ntp = 1\nslots = 4\n')
    base = [
        "passes",
        "--makespan",
        "math",
        "--cluster",
        str(cluster),
        "--trajectories",
        "8",
        "--samples",
        "4",
    ]
    base += ["--out", str(out), "--strategies", "sticky-forecast,heddle:migration=none"]
    first = CliRunner().invoke(bench, [*base, "--predictors", "none"])
    assert first.exit_code == 0, first.output
    before = out.read_text()
    again = CliRunner().invoke(bench, [*base, "--predictors", "exact,none"])
    assert again.exit_code == 0, again.output
    assert out.read_text().startswith(before)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["arm"], row["predictor"]) for row in rows] == [
        ("sticky-forecast", "none"),
        ("heddle:migration=none", "none"),
        ("sticky-forecast", "exact"),
        ("heddle:migration=none", "exact"),
    ]
    assert len(again.stderr.splitlines()) == 2  # a line for each run
    assert again.stdout.splitlines()[2].startswith("| math | `sticky-forecast` | exact |")
    other = CliRunner().invoke(bench, [*base, "--predictors", "none", "--tp", "2"])
    assert other.exit_code == 0 and len(out.read_text().splitlines()) == 6


def test_a_gain_is_that_of_the_first_row_on_the_same_seeds() -> None:
    def row(arm: str, seed: int, seconds: float) -> dict[str, object]:
        of = {"workload": "w", "arm": arm, "predictor": "none", "bound_share": 0.5}
        return {**of, "seed": seed, "makespan_s": seconds}

    rows = [row("a", 1, 10.0), row("a", 2, 30.0), row("b", 1, 20.0), row("b", 2, 20.0)]
    *_, first, second = makespan_tables(rows)
    assert first.endswith("| 20 (10-30) | 50% | 1.00 (1.00-1.00) |")
    assert second.endswith("| 20 (20-20) | 50% | 1.00 (0.50-1.50) |")


def test_predictors_are_named_once() -> None:
    assert predictors_named("exact, none,exact") == ["exact", "none"]
    assert predictors_named("all") == list(PREDICTORS)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--makespan", "math", "--predictors", "perfect"],
        ["--makespan", "math", "--predictors", ""],
        ["--makespan", "math", "--strategies", "heddle:predictor=oracle"],
        ["--makespan", "math", "--strategies", "heddle:order=longest"],
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments: list[str]) -> None:
    result = CliRunner().invoke(bench, ["passes", *arguments])
    assert result.exit_code == 2 and len(result.stderr.strip().splitlines()) == 1, result.output
