"""The bias of redundancy on attempts whose lengths and rewards are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.redundancy.attempts import RecordedAttempt
from benchmarks.redundancy.live import LiveBatch, live_outcomes
from benchmarks.redundancy.replay import replay
from benchmarks.redundancy.rows import RedundancySweep, measure_redundancy, row_of
from heddle_dask.core.errors import BadInput
from heddle_dask.records.token_record import TokenRecord
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.training.groups import FinishedGroup, GroupPlan


def trace(path: Path, groups: int = 8, size: int = 6) -> Path:
    """Attempts of 10, 20, … tokens at each task; the three shortest fail."""
    rows = [
        {
            "id": f"{group}-{n}",
            "group": f"g{group}",
            "prompt_tokens": 5,
            "complete": True,
            "success": n >= 3,
            "steps": [{"gen_tokens": 10 * (n + 1), "obs_tokens": 0, "tool": None, "tool_s": None}],
        }
        for group in range(groups)
        for n in range(size)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def group(name: str, *seconds: float) -> list[RecordedAttempt]:
    """Attempts with a step and ten tokens a second; those of more than two seconds fail."""
    return [RecordedAttempt(name, each, 1, round(10 * each), float(each <= 2)) for each in seconds]


def test_the_shortest_count(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl")
    (row,) = measure_redundancy(path, RedundancySweep(3, [3], 2, [0]))
    assert (row.groups, row.tokens_counted, row.tokens_all) == (8, 20.0, 35.0)
    assert (row.reward_counted, row.reward_all) == (0.0, 0.5)
    assert (row.reward_ci, row.tokens_ci, row.steps_ci) == ((-0.5, -0.5), (-15.0, -15.0), (0.0, 0.0))
    # 10, 20 and 30 tokens are kept; three others had generated 30 each.
    assert row.wasted_share == pytest.approx(90 / 150) and row.group_s == pytest.approx(0.6)
    none, kept = measure_redundancy(path, RedundancySweep(3, [0, 3], 2, [0], ["keep"]))
    assert (kept.tokens_counted, kept.reward_counted, kept.wasted_share) == (35.0, 0.5, 0.0)
    assert (kept.reward_ci, kept.late_share, kept.group_s) == ((0.0, 0.0), 0.5, pytest.approx(0.6))
    # The rows are of the same groups, of which this one starts the first attempts.
    assert none.groups == 8 and none.tokens_counted == none.tokens_all and none.wasted_share == 0.0
    assert none.group_s == none.group_plain_s == row.group_plain_s and none.batch_s == none.batch_plain_s


def test_a_group_that_comes_late_is_waste_or_counts_later() -> None:
    groups = [group("a", 3.0, 1.0), group("b", 1.0, 2.0)]
    (batch,) = replay(GroupPlan(2, 0, 1, 1), groups)
    late, first = batch.groups
    assert (batch.full_s, batch.plain_s) == (2.0, 3.0)
    # One attempt had ended; the other had generated for 2 of its 3 seconds.
    assert (late.counted, late.complete_s, late.generated_tokens) == ([], None, 30.0)
    assert first.counted == groups[1] and first.complete_s == 2.0
    row = row_of("x", "replayed", GroupPlan(2, 0, 1, 1), [batch], 0)
    assert (row.reward_counted, row.reward_all) == (1.0, 0.75) and row.wasted_share == 0.5
    (batch,) = replay(GroupPlan(2, 0, 1, 1, "keep"), groups)
    assert [(len(each.counted), each.late) for each in batch.groups] == [(2, 2), (2, 0)]


def test_too_few_attempts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has 0 groups of 9 attempts"):
        measure_redundancy(trace(tmp_path / "t.jsonl"), RedundancySweep(9, [0], 1, [0]))


def test_a_cancelled_batch_is_set_against_the_run_in_full() -> None:
    groups = [group("g000000", 1.0, 3.0), group("g000001", 2.0, 2.0)]
    short = TrajectoryRecord(
        trajectory_id="g000000/0",
        group_id="g000000",
        task_id="t",
        environment="e",
        sample_index=0,
        seed=0,
        status="completed",
        cause="",
        detail="",
        reward=1.0,
        branches=(TokenRecord(),),
        steps=(),
        actions=(),
        started_s=10.0,
        finished_s=11.5,
    )
    failed = replace(short, status="failed", cause="agent", reward=None, finished_s=10.5)
    finished = FinishedGroup("g000000", "t", "e", (failed, short))
    batch = LiveBatch((finished,), ("g000000", "g000001", "g000002"))
    # The third group has no counterpart in full.
    (outcome,) = live_outcomes(GroupPlan(1, 1, 1, 2), [batch], groups, {"g000000": 25, "g000001": 10, "g000002": 99})
    assert [len(each.counted) for each in outcome.groups] == [1, 0]
    assert [each.generated_tokens for each in outcome.groups] == [25, 10]
    assert (outcome.full_s, outcome.plain_s, outcome.groups[0].complete_s) == (1.5, 1.0, 1.5)
