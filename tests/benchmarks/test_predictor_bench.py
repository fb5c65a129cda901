"""``python -m benchmarks predictor``: scores, list scheduling, the report, and bad input."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.command import bench
from benchmarks.predictor_scores import long_recall, makespan, ranks, score


def test_perfect_predictions_score_perfectly() -> None:
    total = np.arange(10.0, 110.0, 10.0)
    exact = np.log1p(total)
    made = score(np.zeros(10), total, exact, exact)
    assert made == pytest.approx({"recall": 1.0, "pearson": 1.0, "rank": 1.0, "error": 0.0, "coverage": 1.0})


def test_constant_predictions_have_no_order() -> None:
    assert np.isnan(long_recall(np.ones(10), np.arange(10.0)))
    assert ranks(np.array([3.0, 1.0, 3.0])).tolist() == [1.5, 0.0, 1.5]


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=5), min_size=1, max_size=12), st.integers(1, 4))
def test_makespan_is_between_its_bounds(steps: list[list[int]], slots: int) -> None:
    jobs = [[float(step) for step in job] for job in steps]
    spent = makespan(jobs, [[0.0] * len(job) for job in jobs], slots)
    work = sum(sum(job) for job in jobs)
    assert max(max(sum(job) for job in jobs), work / slots) <= spent <= work


def test_longest_first_beats_longest_last() -> None:
    jobs = [[1.0], [1.0], [1.0], [3.0]]
    assert makespan(jobs, [[1.0], [1.0], [1.0], [3.0]], 2) == 3.0
    assert makespan(jobs, [[3.0], [2.0], [1.0], [0.0]], 2) == 4.0


def _trace(path: Path, groups: int = 40) -> Path:
    rng = random.Random(0)
    lines = []
    for group in range(groups):
        for trial in range(3):
            steps = [
                {
                    "gen_tokens": rng.randint(5, 50),
                    "obs_tokens": 5,
                    "tool": "bash",
                    "tool_s": 1.0,
                    "llm_s": 2.0,
                }
                for _ in range(rng.randint(1, 12))
            ]
            lines.append(
                {
                    "id": f"{group}-{trial}",
                    "group": f"g{group}",
                    "prompt_tokens": rng.randint(5, 90),
                    "complete": trial < 2 or group % 5 > 0,
                    "steps": steps,
                }
            )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("points", ["recorded", "asked"])
def test_report_has_every_method_and_order(tmp_path: Path, points: str) -> None:
    path = _trace(tmp_path / "trace.jsonl")
    result = CliRunner().invoke(
        bench, ["predictor", "--trace", str(path), "--folds", "2", "--points", points, "--json"]
    )
    assert result.exit_code == 0, result.output
    (made,) = json.loads(result.stdout.splitlines()[-1])["files"]
    assert {row["method"] for row in made["rows"]} >= {"xgboost cold", "xgboost warm", "group history"}
    assert {row["steps_finished"] for row in made["rows"]} == {0, 1, 2, 5, 10}
    orders = {row["order"]: row["share_of_fcfs"] for row in made["orders"]}
    assert orders["oracle"] <= min(orders.values()) + 0.05
    assert [row["rows"] for row in made["latency"]] == [1, 16, 64, 256]


@pytest.mark.parametrize("content", [None, "", "nonsense\n", '{"id": "a"}\n'])
def test_bad_trace_is_one_line(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_text(content)
    result = CliRunner().invoke(bench, ["predictor", "--trace", str(path)])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1


def test_too_few_groups_are_one_line(tmp_path: Path) -> None:
    path = _trace(tmp_path / "trace.jsonl", groups=3)
    result = CliRunner().invoke(bench, ["predictor", "--trace", str(path), "--folds", "9"])
    assert result.exit_code == 2 and "use fewer" in result.stderr
