"""Other people's tools read a run, without a warning (warnings are errors here)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import xarray as xr
import zarr
from worlds.record_builders import plain_trajectory

from heddle_dask.records.reader import RunReader, column_names
from heddle_dask.records.schema import TABLES
from heddle_dask.records.store import RunStore

RECORDS = [
    replace(plain_trajectory(0), reward=None, detail="größer ≠ 😀", status="failed", cause="agent"),
    plain_trajectory(1),
]
DOCUMENT = Path(__file__).parents[2] / "docs" / "data.md"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("readable") / "runs" / "x.zarr"
    with RunStore.create(path, {"environment": "math"}) as store:
        store.append(RECORDS[:1])
        store.append(RECORDS[1:])
    return path


@pytest.mark.parametrize("name", column_names())
def test_zarr_and_dask_read_every_column(run, name):
    expected = RunReader(run).column(name)
    group = zarr.open_group(run, mode="r")
    np.testing.assert_array_equal(group[name][:], expected)
    np.testing.assert_array_equal(da.from_zarr(str(run), component=name).compute(), expected)
    np.testing.assert_array_equal(da.from_zarr(group[name]).compute(), expected)


@pytest.mark.parametrize("table", TABLES)
def test_xarray_reads_every_table(run, table):
    dataset = xr.open_zarr(run, group=table, consolidated=False)
    assert set(dataset.data_vars) == set(TABLES[table].columns)
    assert dict(dataset.sizes) == {TABLES[table].dimension: RunReader(run).rows[table]}
    for name in TABLES[table].columns:
        np.testing.assert_array_equal(dataset[name].values, RunReader(run).column(f"{table}/{name}"))


def test_zarr_lists_a_run(run):
    group = zarr.open_group(run, mode="r")
    assert sorted(name for name, _ in group.members()) == sorted(TABLES)
    assert group.attrs["metadata"] == {"environment": "math"}
    assert group["trajectories/detail"][0] == "größer ≠ 😀"


def test_an_empty_run_is_readable(tmp_path):
    RunStore.create(tmp_path / "x.zarr", {}).close()
    assert xr.open_zarr(tmp_path / "x.zarr", group="steps", consolidated=False).sizes["step"] == 0
    assert list(RunReader(tmp_path / "x.zarr")) == []


def samples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def test_samples_of_the_documentation_run(run, tmp_path, monkeypatch, capsys):
    assert len(samples()) == 5
    (tmp_path / "runs").symlink_to(run.parent)
    monkeypatch.chdir(tmp_path)
    found: dict[str, object] = {}
    for sample in samples():
        if "parquet" in sample:
            pytest.importorskip("pyarrow")
        exec(compile(sample, str(DOCUMENT), "exec"), found)
    assert "RunSummary" in capsys.readouterr().out
    assert found["sampled_ids"].tolist() == [0, 1, 2, 3, 4] * 6
    assert found["mean_logprob"] == -0.5
    assert found["reward_by_group"].to_dict() == {"g0": 1.0}
    assert (tmp_path / "x.parquet").exists()


def test_documentation_names_every_column():
    text = DOCUMENT.read_text()
    for table, layout in TABLES.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{table}`")]
        named = re.findall(r"`(\w+)`", row)
        assert named == [table, layout.dimension, *layout.columns]
