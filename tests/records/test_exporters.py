from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from worlds.record_builders import plain_trajectory

from heddle_dask.core.errors import BadInput
from heddle_dask.records.exporters import export_parquet
from heddle_dask.records.store import RunReader, RunStore


@pytest.fixture
def run(tmp_path) -> RunReader:
    forked = replace(plain_trajectory(0), reward_parts={"format": 0.5}, metadata={"turns": [1]})
    forked = replace(forked, branches=(*forked.branches, forked.branches[0].fork(7)), reward=None)
    with RunStore.create(tmp_path / "x.zarr", {}) as store:
        store.append([forked, plain_trajectory(1)])
    return RunReader(tmp_path / "x.zarr")


def test_parquet_has_one_row_per_branch(run, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert export_parquet(run, tmp_path / "x.parquet") == 3
    rows = parquet.read_table(tmp_path / "x.parquet").to_pylist()
    assert [(r["trajectory_id"], r["branch"], r["branches"]) for r in rows] == [
        ("t0", 0, 2),
        ("t0", 1, 2),
        ("t1", 0, 1),
    ]
    assert [r["reward"] for r in rows] == [None, None, 1.0]
    assert [json.loads(r["reward_parts"]) for r in rows] == [{"format": 0.5}, {"format": 0.5}, {}]
    assert [json.loads(r["metadata"]) for r in rows] == [{"turns": [1]}, {"turns": [1]}, {}]
    for row in rows:
        branch = run.trajectory(0 if row["trajectory_id"] == "t0" else 1).branches[row["branch"]]
        assert row["token_ids"] == branch.token_ids.tolist()
        assert row["loss_mask"] == branch.loss_mask.tolist()
        assert row["policy_version"] == branch.policy_version.tolist()
        for found, expected in zip(row["logprobs"], branch.logprobs.tolist(), strict=True):
            assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_bad_paths_are_refused(run, tmp_path):
    pytest.importorskip("pyarrow.parquet")
    (tmp_path / "taken").write_text("x")
    with pytest.raises(BadInput, match="exists"):
        export_parquet(run, tmp_path / "taken")
    with pytest.raises(BadInput, match="cannot write"):
        export_parquet(run, tmp_path / "no" / "such" / "folder.parquet")


def test_says_what_to_install_without_pyarrow(run, tmp_path: Path, monkeypatch):
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(BadInput, match="pip install pyarrow"):
        export_parquet(run, tmp_path / "x.parquet")
