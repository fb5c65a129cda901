"""The soak at its shortest: real processes are killed, nothing is lost, nothing is left; and its arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from benchmarks.process_usage import KINDS
from benchmarks.soak import KILLED, MemoryPlan, SoakPlan, SoakReport

MARK = "HEDDLE_TEST_MARK"


def test_batches_start_their_trajectories_over_the_minutes() -> None:
    assert SoakPlan(2.5, 1, 100, 0, 0).batches == [(100, 60.0), (100, 60.0), (50, 30.0)]
    assert SoakPlan(0.1, 1, 100, 0, 0).batches == [(10, 6.0)]
    assert SoakPlan(1, 1, 100, 0, 0).interval_s == 5.0 and SoakPlan(30, 1, 100, 0, 0).interval_s == 30.0


def test_growth_counts_after_the_first_ten_thousand_trajectories() -> None:
    plan = MemoryPlan(12_500, 1, 0)
    assert [count for count, _ in plan.batches] == [1000] * 12 + [500]
    held = [(0, 100.0), (5_000, 300.0), (10_000, 310.0), (11_000, 310.5), (12_000, 311.0)]
    rows = [{"trajectories": done, "rss_mib": dict.fromkeys(KINDS, mib)} for done, mib in held]
    assert SoakReport(plan, rows=rows).growth_mib() == dict.fromkeys(KINDS, 0.5)
    assert SoakReport(plan, rows=rows[:3]).growth_mib() == {}


def test_a_soak_fails_when_something_is_lost_or_left() -> None:
    plan = SoakPlan(1, 1, 1, 0, 0)
    assert SoakReport(plan, statuses={"completed": 3}).succeeded
    assert not SoakReport(plan, statuses={"completed": 3, "failed": 1}).succeeded
    assert not SoakReport(plan, statuses={"completed": 3}, missing=1).succeeded
    assert not SoakReport(plan, statuses={"completed": 3}, left=["python"]).succeeded
    assert SoakReport(plan, statuses={"lost": 1}, missing=1).as_json()["lost"] == 2


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.long
def test_a_short_soak_loses_nothing_under_kills_and_ends_by_itself(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    arguments = ["--minutes", "0.3", "--trajectories-per-minute", "120", "--kill-every-s", "5", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "soak", *arguments],
        cwd=tmp_path,
        env={**os.environ, MARK: mark, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["trajectories"], result["completed"], result["lost"], result["failed"]) == (36, 36, 0, 0)
    assert set(result["kills"]) == set(KILLED) and sum(result["kills"].values()) >= 1
    assert len(result["rows"]) >= 3 and result["rows"][-1]["trajectories"] == 36
    for row in result["rows"]:
        assert set(row["rss_mib"]) == set(KINDS) and row["rss_mib"]["driver"] > 0
        assert row["processes"] > 5 and row["open_files"] > row["processes"] and row["shm_files"] >= 0
    assert all(row["rss_mib"]["scheduler"] > 0 and row["rss_mib"]["rollout"] > 0 for row in result["rows"])
    assert result["left"] == []
    # Nothing of it is left on this machine: neither a process nor a directory. A user's runs share records of engines,
    # claims of cores, and the place of sandboxes, which is empty.
    shared = {f"heddle-{of}-{os.getuid()}" for of in ("engines", "cores", "sandboxes")}
    assert {path.name for path in tmp_path.iterdir()} <= shared
    assert not list(tmp_path.glob("heddle-sandboxes-*/*"))
    assert not [pid for pid in Path("/proc").iterdir() if pid.name.isdigit() and _has(pid, f"{MARK}={mark}")]


def _has(process: Path, entry: str) -> bool:
    try:
        return entry.encode() in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
