"""What a score cost is read from the logs of trainings, resumed ones included."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.learning import trainings
from benchmarks.learning.gains import COLUMNS, arm_gains, cost_to_score
from benchmarks.learning.trainings import StudyRun, evaluation_figures, train
from benchmarks.row_file import RowFile
from heddle_dask.core.errors import BadInput
from heddle_dask.records.store import RunStore


def metrics(step: int, elapsed_s: float, tokens: float) -> dict[str, Any]:
    return {"step": step, "elapsed_s": elapsed_s, "tokens_per_s": tokens / elapsed_s}


def evaluation(number: int, reward: float | None) -> dict[str, Any]:
    return {"number": number, "reward": reward, "reward_ci": [0.1, 0.9], "rewards": {"a": reward}}


def test_costs_add_up_over_the_processes_of_a_training() -> None:
    logged = [metrics(1, 10, 100), metrics(2, 20, 300), metrics(2, 7, 50), metrics(3, 9, 80)]
    found = list(evaluation_figures(logged, [evaluation(n, r) for n, r in ((0, 0.5), (2, 0.7), (3, 0.6), (4, 0.9))]))
    costs = [(row["number"], row["reward"], row["seconds"], row["tokens"]) for row in found]
    assert costs == [(0, 0.5, 0.0, 0), (2, 0.7, 27.0, 350), (3, 0.6, 29.0, 380)], "weights 4 have no row yet"
    assert cost_to_score(found, 0.65) == found[1] and cost_to_score(found, 0.8) is None
    assert list(evaluation_figures([], [evaluation(0, None)])) == []
    # One that was interrupted twice in its first step, and then in its second, before which a longer first row comes.
    ended = [{"rows": rows, "unlogged_s": seconds} for rows, seconds in ((0, 30.0), (0, 4.0), (1, 6.0), (2, 5.0))]
    found = list(evaluation_figures([metrics(1, 10, 100), metrics(2, 27, 50)], [evaluation(2, 0.5)], ended))
    assert [(row["seconds"], row["tokens"]) for row in found] == [(34 + 10 + 6 + 27, 150)]


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ("heddle: nothing to learn: of the last 64 groups none", "nothing to learn: of the last 64 groups none"),
        ("heddle: --model: no such directory", None),
    ],
)
def test_a_training_with_nothing_left_to_learn_is_a_row_and_another_failure_ends_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, ends: str | None
) -> None:
    run = StudyRun("math", 2, "prefix", ("--steps", "9"), tmp_path)
    out = run.directory.path
    RunStore.create(out / "rollout.zarr", {}).close()
    trainer = {"importance_weight_max": 1.5}
    row = json.dumps({**metrics(1, 2.0, 40.0), "without_variance_share": 0.25, "trainer": trainer})
    script = f"""
import sys
from pathlib import Path
out = Path({str(out)!r})
(out / "metrics.jsonl").write_text({row!r} + chr(10))
(out / "evaluations.jsonl").write_text({json.dumps(evaluation(1, 0.5))!r} + chr(10))
print({said!r}, file=sys.stderr)
sys.exit(2)
"""
    monkeypatch.setattr(trainings, "_LOOK_S", 0.01)
    monkeypatch.setattr(StudyRun, "command", property(lambda self: [sys.executable, "-c", script]))
    rows = RowFile(tmp_path / "rows.jsonl")
    if ends is None:
        with pytest.raises(BadInput, match="ended with 2: --model: no such directory; give the command again"):
            list(train(run, rows, "code"))
        assert rows.rows("training") == []
    else:
        list(train(run, rows, "code"))
        (whole,) = rows.rows("training")
        assert (whole["ended"], whole["steps"], whole["without_variance_share"]) == (ends, 1, 0.25)
        assert whole["importance_weight_max"] == 1.5
        assert list(train(run, rows, "code")) == [], "it is not run again"
    (kept,) = rows.rows("evaluation")
    assert (kept["number"], kept["reward"], kept["seconds"]) == (1, 0.5, 2.0)
    assert run.log.read_text() == said + "\n" and run.processes.exists()


def test_a_training_is_named_by_what_both_arms_share(tmp_path: Path) -> None:
    run = StudyRun("math:hard", 2, "prefix", ("--steps", "2"), tmp_path)
    assert run.directory.path == tmp_path / "math-hard-2-prefix"
    assert run.command[-3:] == ["--steps", "2", "--prefix-sampling"]
    rows = RowFile(tmp_path / "rows.jsonl")
    rows.add({**run.key, "steps": 2})
    rows.add({**run.key, "kind": "evaluation", "number": 0})
    again = RowFile(tmp_path / "rows.jsonl")
    assert again.find(run.key) is not None and len(again.rows("evaluation")) == 1


def run_of(arm: str, seed: int, *evaluated: tuple[int, list[float | None]]) -> list[dict[str, Any]]:
    costs = {"tokens": 1000, "seconds": 10.0}
    by_task = [
        {task: reward for task, reward in zip("abcd", rewards, strict=True) if reward is not None}
        for _, rewards in evaluated
    ]
    return [
        {
            "env": "math",
            "arm": arm,
            "seed": seed,
            "number": number,
            "rewards": rewards,
            "reward": fmean(rewards.values()),
        }
        | {name: number * cost for name, cost in costs.items()}
        for (number, _), rewards in zip(evaluated, by_task, strict=True)
    ]


def test_arms_are_paired_by_seed_and_task_and_a_score_is_reached_over_the_common_start() -> None:
    rows = [
        *run_of("async", 0, (0, [0, 0, 1, 1]), (5, [0, 0, 1, 1]), (10, [1, 0, 1, 1])),
        *run_of("async", 1, (0, [0, 0, 0, 1]), (5, [1, 1, 1, 1]), (10, [0, 1, 0, 1])),
        *run_of("prefix", 0, (0, [0, 0, 0, 1]), (5, [0, 1, 1, None]), (10, [1, 1, 1, None])),
        *run_of("sync", 0, (0, [0, 0, 1, 1])),
    ]
    without, behind = arm_gains(rows, 0.2)
    assert (without.arm, without.seeds, without.before, without.after) == ("async", 2, 0.375, 0.625)
    assert without.gain.mean == 0.25 and without.over_baseline is None
    # The starts of seed 0 have the mean (2/4 + 1/4 + 2/4) / 3; evaluations of the first weights reach nothing.
    assert (without.reached, without.tokens, without.seconds) == (2, 7500, 75)
    assert (behind.arm, behind.seeds, behind.reached, behind.tokens) == ("prefix", 1, 1, 5000)
    assert behind.gain.mean == 1.0 and behind.over_baseline is not None
    assert behind.over_baseline.mean == pytest.approx(1 / 3), "of the three tasks that both have"
    assert [row.reached for row in arm_gains(rows, 0.8)] == [0, 0]
    assert next(arm_gains(rows, 0.8)).seconds is None


def test_the_figures_of_the_page_are_those_of_the_rows() -> None:
    root = Path(__file__).parents[2]
    page = " ".join((root / "docs" / "training.md").read_text(encoding="utf-8").replace("\N{MINUS SIGN}", "-").split())
    groups = " ".join((root / "docs" / "groups.md").read_text(encoding="utf-8").replace("\N{MINUS SIGN}", "-").split())
    file = RowFile(root / "benchmarks" / "learning_rows.jsonl")
    at = {
        rate: [row for row in file.rows("evaluation") if f"--lr {rate} " in row["conditions"]]
        for rate in ("0.0002", "0.0005")
    }
    gains = {(row.env, row.arm): row for row in arm_gains(at["0.0002"], 0.1)}
    assert len(gains) == 6
    for row in gains.values():
        cells = [text(row) for head, text in COLUMNS if not head.startswith("after, minus")]
        assert f"| {' | '.join(cells)} |" in page

    def spent(env: str, arm: str, unit: str, *seeds: int) -> float:
        return sum(
            max(row[unit] for row in at["0.0002"] if (row["env"], row["arm"], row["seed"]) == (env, arm, seed))
            for seed in seeds
        )

    of_sync = [spent(env, "async", "seconds", 1, 2) / spent(env, "sync", "seconds", 1, 2) for env in ("math", "search")]
    assert f"took {of_sync[0]:.2f} of the seconds on `math` and {of_sync[1]:.2f} on `search` (seeds 1 and 2)" in page
    of_async = [
        spent(env, "prefix", "tokens", 0, 1, 2) / spent(env, "async", "tokens", 0, 1, 2) for env in ("math", "search")
    ]
    assert f"took {of_async[0]:.2f} of the tokens of async on `math` and {of_async[1]:.2f} on `search`" in groups
    for env in ("math", "search"):
        sync, prefix = gains[env, "sync"].over_baseline, gains[env, "prefix"].over_baseline
        assert sync is not None and prefix is not None
        assert f"{-sync.mean:+.3f} on `{env}` ({-sync.high:+.3f} to {-sync.low:+.3f})" in page
        assert f"{prefix.mean:+.3f} on `{env}`, {prefix.low:+.3f} to {prefix.high:+.3f}" in groups
    (first,) = [row for row in arm_gains(at["0.0005"], 0.1) if (row.env, row.arm) == ("math", "sync")]
    assert first.reached == 3 and f"after {first.tokens:,.0f} tokens and {first.seconds:.0f} s" in page
    weights = [
        max(row["importance_weight_max"] for row in file.rows("training") if f"--lr {rate} " in row["conditions"])
        for rate in at
    ]
    assert f"importance weights up to {weights[1]:.0f}" in page and f"weights are at most {weights[0]:.1f}" in page
