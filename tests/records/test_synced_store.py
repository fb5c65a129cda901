"""What a store writes is on disk before it takes its name, and has its name before it counts."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
from worlds.record_builders import exact, plain_trajectory

from heddle_dask.records.store import RunReader, RunStore

BEFORE = [plain_trajectory(index) for index in range(2)]
AFTER = [plain_trajectory(2)]


class Disk:
    """Watches what happens to files: syncs, and renames, which it can refuse from the given one on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dies_at: int = 10**9) -> None:
        self.synced: set[Path] = set()
        self.named: list[Path] = []
        self.dies_at = dies_at
        monkeypatch.setattr("heddle_dask.records.synced_store.sync_path", self.synced.add)
        monkeypatch.setattr(os, "replace", self.replace)

    def replace(self, source: Path, target: Path) -> None:
        if len(self.named) >= self.dies_at:
            raise OSError("the disk died")
        assert source in self.synced, f"{target} takes its name before it is on disk"
        if target.parent.name.endswith(".zarr") and self.named:
            # The row counts: every name before them is on disk.
            assert {path.parent for path in self.named} <= self.synced
        os.rename(source, target)
        self.named.append(target)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synced") / "x.zarr"
    with RunStore.create(path, {"seed": 1}) as store:
        store.append(BEFORE)
    return path


def stored(path: Path) -> list[str]:
    return [exact(record) for record in RunReader(path)]


def test_everything_is_on_disk_before_the_rows_count(run: Path, tmp_path: Path, monkeypatch) -> None:
    path = shutil.copytree(run, tmp_path / "x.zarr")
    with RunStore.append_to(path) as store:
        disk = Disk(monkeypatch)
        store.append(AFTER)
    assert len(disk.named) > 90 and disk.named[-1] == path / "zarr.json"
    assert path in disk.synced
    assert stored(path) == [exact(record) for record in BEFORE + AFTER]


@pytest.mark.parametrize("dies_at", [0, 1, 50, -2, -1])
def test_a_disk_that_dies_between_two_names_leaves_what_was_committed(run, tmp_path, monkeypatch, dies_at):
    path = shutil.copytree(run, tmp_path / "x.zarr")
    with RunStore.append_to(path) as store:
        names = len(Disk(monkeypatch).named)
        with monkeypatch.context() as counting:
            disk = Disk(counting)
            store.append([plain_trajectory(8)])
            names = len(disk.named)
    shutil.rmtree(path)
    shutil.copytree(run, path)
    with RunStore.append_to(path) as store:
        with monkeypatch.context() as dying:
            Disk(dying, dies_at % names)
            with pytest.raises(OSError, match="the disk died"):
                store.append(AFTER)
        assert stored(path) == [exact(record) for record in BEFORE]
        store.update_metadata({"note": "still here"})  # the same writer goes on
        store.append(AFTER)
    assert stored(path) == [exact(record) for record in BEFORE + AFTER]
    assert RunReader(path).metadata == {"seed": 1, "note": "still here"}
    assert list(path.rglob("*.partial")) == []


def test_no_reader_sees_what_is_not_settled(run: Path, tmp_path: Path, monkeypatch) -> None:
    """Read once in each state that the directory has while the disk is waited for."""
    path = shutil.copytree(run, tmp_path / "x.zarr")
    seen: dict[object, list[str]] = {}
    reading = threading.Lock()

    def read_each_state(synced: Path) -> None:
        with reading:
            state = frozenset(path.rglob("*.partial")), (path / "zarr.json").read_bytes()
            if state not in seen:
                seen[state] = stored(path)

    with RunStore.append_to(path) as store, monkeypatch.context() as watching:
        watching.setattr("heddle_dask.records.synced_store.sync_path", read_each_state)
        store.append(AFTER)
    before, after = ([exact(record) for record in records] for records in (BEFORE, BEFORE + AFTER))
    # Rows without names, rows with names, the row counts without a name, all with names.
    assert list(seen.values()) == [before, before, before, after]
