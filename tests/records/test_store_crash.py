"""A run whose writer dies at any moment keeps what was committed, and can be gone on with."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zarr
from worlds.record_builders import exact, plain_trajectory
from zarr.storage import LocalStore, WrapperStore

from heddle_dask.records.schema import TABLES
from heddle_dask.records.store import RunReader, RunStore

BEFORE = [plain_trajectory(index) for index in range(3)]
AFTER = [plain_trajectory(index) for index in range(3, 5)]


class DiskDied(OSError):
    pass


class FailingStore(WrapperStore[LocalStore]):
    """A directory that refuses writes number `first` to `last`, counted from 0.

    With `late` it does as told and reports a failure all the same, as network mounts may.
    """

    def __init__(self, path: Path, first: int, last: int, late: bool = False) -> None:
        super().__init__(LocalStore(path))
        self.keys: list[str] = []
        self.refused = range(first, last + 1)
        self.late = late

    async def set(self, key, value):
        number = len(self.keys)
        self.keys.append(key)
        if number in self.refused:
            if self.late:
                await super().set(key, value)
            raise DiskDied(f"write {number}: {key}")
        await super().set(key, value)


def open_failing(path: Path, first: int, last: int, late: bool = False) -> tuple[RunStore, FailingStore]:
    directory = FailingStore(path, first, last, late)
    return RunStore(zarr.open_group(directory, mode="r+")), directory


def stored(path: Path) -> list[str]:
    return [exact(record) for record in RunReader(path)]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("crash") / "x.zarr"
    with RunStore.create(path, {"seed": 1}) as store:
        store.append(BEFORE)
    return path


def keys_of_an_append(run: Path, copy: Path) -> list[str]:
    """The files that an append writes, in order."""
    shutil.copytree(run, copy)
    store, directory = open_failing(copy, -1, -2)
    store.append(AFTER)
    assert stored(copy) == [exact(record) for record in BEFORE + AFTER]
    return directory.keys


def crash_and_go_on(run: Path, copy: Path, stage: int) -> None:
    shutil.copytree(run, copy)
    dying, _ = open_failing(copy, stage, 10**9)
    with pytest.raises(DiskDied):
        dying.append(AFTER)
    # What zarr's write aside leaves behind when the process dies in it:
    (copy / f"zarr.{stage}.partial").write_bytes(b"{")
    (copy / "tokens" / "ids" / "c" / f"0.{stage}.partial").write_bytes(b"half a chunk")

    before = [exact(record) for record in BEFORE]
    assert stored(copy) == before
    with RunStore.append_to(copy) as store:
        ids = zarr.open_group(copy, mode="r")["tokens/ids"]
        assert ids.shape == (RunReader(copy).rows["tokens"],)
        assert sorted(copy.rglob("*.partial")) == []
        assert stored(copy) == before
        store.append(AFTER)
    assert stored(copy) == [exact(record) for record in BEFORE + AFTER]
    shutil.rmtree(copy)


def test_an_append_that_dies_at_its_ends_is_repaired(run, tmp_path):
    writes = len(keys_of_an_append(run, tmp_path / "whole.zarr"))
    assert writes > 90  # every column: its shape and its last chunk; and the commit
    for stage in (0, 1, writes - 2, writes - 1):
        crash_and_go_on(run, tmp_path / "x.zarr", stage)


@pytest.mark.slow
def test_an_append_that_dies_at_any_kind_of_write_is_repaired(run, tmp_path):
    """In each table the first shape and the first chunk, and one write of 41, which is a shape or a chunk in turn.

    The columns of a table are written in the same way; the first writes and the commit are in the test above.
    """
    keys = keys_of_an_append(run, tmp_path / "whole.zarr")
    kinds = [(key.split("/")[0], key.endswith("zarr.json")) for key in keys]
    assert len(set(kinds)) == 2 * len(TABLES) + 1  # and the root
    in_the_test_above = {0, 1, len(keys) - 2, len(keys) - 1}
    for stage in sorted({*map(kinds.index, kinds), *range(41, len(keys), 41)} - in_the_test_above):
        crash_and_go_on(run, tmp_path / "x.zarr", stage)


@pytest.mark.parametrize("stage", [0, 1, 40, -1])
def test_the_same_writer_goes_on_after_a_refused_write(run, tmp_path, stage):
    if stage < 0:
        stage += len(keys_of_an_append(run, tmp_path / "whole.zarr"))
    path = tmp_path / "x.zarr"
    shutil.copytree(run, path)
    store, _ = open_failing(path, stage, stage)
    with pytest.raises(DiskDied):
        store.append(AFTER)
    store.update_metadata({"note": "still here"})
    assert stored(path) == [exact(record) for record in BEFORE]
    store.append(AFTER[1:])
    store.append(AFTER[:1])
    assert stored(path) == [exact(record) for record in [*BEFORE, *reversed(AFTER)]]


@pytest.mark.parametrize("question", ["in", "metadata", "append"])
def test_a_commit_that_reached_the_disk_counts_whatever_was_reported(run, tmp_path, question):
    commit = len(keys_of_an_append(run, tmp_path / "whole.zarr")) - 1
    path = tmp_path / "x.zarr"
    shutil.copytree(run, path)
    store, _ = open_failing(path, commit, commit, late=True)
    with pytest.raises(DiskDied):
        store.append(AFTER)
    if question == "in":
        assert AFTER[0].trajectory_id in store
    elif question == "metadata":
        store.update_metadata({"note": "still here"})
    later = plain_trajectory(9)
    store.append([later])
    assert stored(path) == [exact(record) for record in [*BEFORE, *AFTER, later]]


WRITER = """
import os, sys
from worlds.record_builders import plain_trajectory
from heddle_dask.records.store import RunStore

with RunStore.append_to(sys.argv[1]) as store:
    while True:
        start = len(store)
        store.append([plain_trajectory(index) for index in range(start, start + 3)])
        os.write(1, b"%d\\n" % len(store))
"""


def test_sigkill_of_a_busy_writer_keeps_what_was_committed(tmp_path):
    path = tmp_path / "x.zarr"
    RunStore.create(path, {}).close()
    chance = random.Random(4)
    for _ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        )
        assert child.stdout is not None
        first = child.stdout.readline()
        time.sleep(chance.uniform(0, 0.3))
        os.kill(child.pid, signal.SIGKILL)
        rest = child.stdout.read()
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
        acknowledged = max(int(line) for line in (first + rest).split(b"\n")[:-1])

        count = len(RunReader(path))
        assert count in (acknowledged, acknowledged + 3)
        with RunStore.append_to(path) as store:
            assert len(store) == count
        expected = [exact(plain_trajectory(index)) for index in range(count)]
        assert stored(path) == expected
