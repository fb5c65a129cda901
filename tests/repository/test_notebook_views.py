"""What objects show of themselves in a notebook: their figures, escaped, with no text of a prompt."""

from __future__ import annotations

import xml.dom.minidom
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds.record_builders import plain_trajectory
from worlds.run_builders import hostile_trajectory, outline_of

from heddle_dask import Batch, RunReader, Strategy
from heddle_dask.core.notebook import MOST_ROWS, facts_html, rows_html
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.batch import rollout_html
from heddle_dask.records.causes import CauseCount
from heddle_dask.records.store import RunStore


def _parsed(shown: Any) -> str:
    html = shown if isinstance(shown, str) else shown._repr_html_()
    xml.dom.minidom.parseString(f"<all>{html}</all>")
    assert "color:" not in html  # colours are those of the notebook's theme
    return html


def test_a_trajectory_and_its_outline() -> None:
    record = plain_trajectory(3)
    html = _parsed(record)
    assert "Trajectory t3" in html and "completed" in html and "engine-1" in html and "15" in html
    assert _parsed(outline_of(record)) == html
    assert "unknown" in _parsed(replace(record, reward=None))


def test_hostile_names_are_text() -> None:
    assert "<script" not in _parsed(hostile_trajectory())
    assert "<script" not in _parsed(rollout_html({"environment": "<script>", "engine": {"kind": "<script>"}}))
    assert "<b>a" not in _parsed(facts_html("<b>a", {"<b>a": "<b>a"}, rows_html(["<b>a"], [["<b>a"]])))


def test_a_long_trajectory_says_how_much_is_left_out() -> None:
    html = _parsed(plain_trajectory(0, steps=MOST_ROWS + 30))
    assert "… 30 more" in html and html.count("<tr") == MOST_ROWS + 1 + 6


def test_a_batch() -> None:
    causes = (CauseCount("failed", "agent", 2, "ValueError: <x>", "t1"),)
    batch = Batch([], 2.5, 0.5, 1000, out="run.zarr", counts={"completed": 3, "failed": 2}, causes=causes)
    html = _parsed(batch)
    for said in (
        "3 completed, 2 failed",
        "400 per second",
        "run.zarr",
        "failed by agent",
        "ValueError: &lt;x&gt;",
    ):
        assert said in html
    assert "unknown" in _parsed(Batch([], 0.0, None, 0))


def test_a_stored_run(tmp_path: Path) -> None:
    with RunStore.create(tmp_path / "run.zarr", {"environment": "math", "strategy": "heddle"}) as store:
        store.append([plain_trajectory(number) for number in range(4)])
    html = _parsed(RunReader(tmp_path / "run.zarr"))
    assert "Run run.zarr: 4 trajectories" in html and "math, heddle" in html and "0.5" in html
    RunStore.create(tmp_path / "empty.zarr", {}).close()
    assert "0 trajectories" in _parsed(RunReader(tmp_path / "empty.zarr"))


def test_a_strategy_shows_what_replaces_the_parts_of_its_preset() -> None:
    html = _parsed(Strategy("heddle", ["scheduling=fcfs"]))
    assert "Strategy heddle" in html and "fcfs" in html and html.count("replaced") == 1


@pytest.mark.cluster
def test_a_cluster_shows_what_it_has_for_rollouts() -> None:
    with LocalRolloutCluster(engines=1, tool_workers=1, tool_cpus=3, dashboard=False) as cluster:
        html = cluster._repr_html_()
    assert "LocalRolloutCluster" in html and "1 with 3 CPUs each" in html and "TLS" in html
