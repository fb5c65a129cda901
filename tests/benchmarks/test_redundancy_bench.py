"""The bias of redundancy on attempts whose lengths and rewards are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heddle_dask.benchmarks.redundancy import measure_redundancy
from heddle_dask.core.errors import BadInput


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


def test_the_shortest_count(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl")
    sizes = {"members": 3, "extra_groups": [0], "groups_per_batch": 2}
    (row,) = measure_redundancy(path, extra_members=[3], **sizes)  # type: ignore[arg-type]
    assert (row.groups, row.tokens_counted, row.tokens_all) == (8, 20.0, 35.0)
    assert (row.reward_counted, row.reward_all) == (0.0, 0.5)
    assert row.reward_bias_ci == (-0.5, -0.5)
    # 10, 20 and 30 tokens are kept; three others had generated 30 each.
    assert row.wasted_share == pytest.approx(90 / 150) and row.seconds_share == pytest.approx(0.5)
    (kept,) = measure_redundancy(path, extra_members=[3], late_members="keep", **sizes)  # type: ignore[arg-type]
    assert (kept.tokens_counted, kept.reward_counted, kept.wasted_share) == (35.0, 0.5, 0.0)
    (none,) = measure_redundancy(path, extra_members=[0], **sizes)  # type: ignore[arg-type]
    assert none.tokens_counted == none.tokens_all and none.wasted_share == 0.0


def test_too_few_attempts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has 0 tasks with 9 attempts"):
        measure_redundancy(
            trace(tmp_path / "t.jsonl"), members=9, extra_members=[0], extra_groups=[0], groups_per_batch=1
        )
