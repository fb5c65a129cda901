"""The batch of a run that is stored: its trajectories are read when they are asked for."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path

import pytest
from worlds.record_builders import exact, plain_trajectory

from heddle_dask.live.driver.batch import Batch, BatchTally, StoredTrajectories
from heddle_dask.live.driver.files.run_writer import RunWriter
from heddle_dask.records.reader import RunReader
from heddle_dask.records.store import RunStore

RECORDS = [plain_trajectory(index) for index in range(6)]


def test_stored_trajectories_are_a_sequence(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    with RunStore.create(out, {}) as store:
        store.append(RECORDS[:5])
    rows = StoredTrajectories(out, range(1, 5), RECORDS[5:])
    expected = [exact(record) for record in RECORDS[1:]]
    assert len(rows) == 5
    assert [exact(record) for record in rows] == expected
    assert [exact(record) for record in rows[1:4]] == expected[1:4]
    assert [exact(record) for record in reversed(rows)] == expected[::-1]
    assert exact(rows[-1]) == expected[-1] and exact(rows[0]) == expected[0]
    with pytest.raises(IndexError):
        rows[5]
    batch = Batch(rows, 1.0, 0.5, 30, str(out))
    assert len(batch) == 5 and [exact(record) for record in batch] == expected
    assert "5 trajectories" in batch._repr_html_()


def test_a_tally_keeps_what_no_store_has_and_counts_all() -> None:
    tally = BatchTally()
    for index, record in enumerate(RECORDS):
        tally.add(record, is_stored=index != 3)
    assert tally.kept == [RECORDS[3]]
    assert (tally.counts, tally.reward_mean, tally.generated_tokens) == ({"completed": 6}, 0.5, 90)
    assert BatchTally().reward_mean is None


def test_a_driver_that_stores_its_trajectories_does_not_keep_them(tmp_path: Path) -> None:
    """60 trajectories of 30,000 tokens take 24 MB as records."""
    out = tmp_path / "run.zarr"

    async def body() -> None:
        writer = RunWriter(out, "create", {})
        tally = BatchTally()
        for number in range(60):
            record = plain_trajectory(number, steps=1, tokens=10_000)
            writer.finish(record)
            tally.add(record, is_stored=True)
            if number % 6 == 5:
                await writer.store()
        await writer.close()
        assert tally.counts == {"completed": 60}

    asyncio.run(RunWriter(tmp_path / "first.zarr", "create", {}).close())  # what is imported and cached
    tracemalloc.start()
    try:
        asyncio.run(body())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    with_all = sum(len(record.branches[0]) * 13 for record in RunReader(out))
    assert with_all > 20e6 and peak < with_all / 2, f"{peak:,} of {with_all:,} bytes"
