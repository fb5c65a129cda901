"""What a score cost is read from the logs of trainings, resumed ones included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.learning.trainings import StudyRun, cost_to_score, evaluation_figures
from benchmarks.row_file import RowFile


def metrics(step: int, elapsed_s: float, tokens: float) -> dict[str, Any]:
    return {"step": step, "elapsed_s": elapsed_s, "tokens_per_s": tokens / elapsed_s}


def evaluation(number: int, reward: float | None) -> dict[str, Any]:
    return {"number": number, "reward": reward, "reward_ci": [0.1, 0.9]}


def test_costs_add_up_over_the_processes_of_a_training() -> None:
    logged = [metrics(1, 10, 100), metrics(2, 20, 300), metrics(2, 7, 50), metrics(3, 9, 80)]
    found = list(evaluation_figures(logged, [evaluation(n, r) for n, r in ((0, 0.5), (2, 0.7), (3, 0.6), (4, 0.9))]))
    costs = [(row["number"], row["reward"], row["seconds"], row["tokens"]) for row in found]
    assert costs == [(0, 0.5, 0.0, 0), (2, 0.7, 27.0, 350), (3, 0.6, 29.0, 380)], "weights 4 have no row yet"
    assert cost_to_score(found, 0.65) == found[1] and cost_to_score(found, 0.8) is None
    assert list(evaluation_figures([], [evaluation(0, None)])) == []


def test_a_training_is_named_by_what_both_arms_share(tmp_path: Path) -> None:
    run = StudyRun("math:hard", 2, "prefix", ("--steps", "2"), tmp_path)
    assert run.directory.path == tmp_path / "math-hard-2-prefix"
    assert run.command[-3:] == ["--steps", "2", "--prefix-sampling"]
    rows = RowFile(tmp_path / "rows.jsonl")
    rows.add({**run.key, "steps": 2})
    rows.add({**run.key, "kind": "evaluation", "number": 0})
    again = RowFile(tmp_path / "rows.jsonl")
    assert again.find(run.key) is not None and len(again.rows("evaluation")) == 1
