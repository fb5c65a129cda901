"""A damaged run gives one line or what was written, never a traceback and never another number."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from worlds.record_builders import exact, plain_trajectory

from heddle_dask.cli.rollout.summary import Tally
from heddle_dask.cli.show.report import show_run, show_trajectory
from heddle_dask.cli.stored_run import StoredRun
from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.files.run_writer import journal_path
from heddle_dask.records.exporters import export_parquet
from heddle_dask.records.journal import Journal, JournalReader
from heddle_dask.records.journal_lines import RESULTS
from heddle_dask.records.reader import RunReader, column_names
from heddle_dask.records.store import RunStore, recover
from heddle_dask.records.trajectory import TRAJECTORY_FINISHED, trajectory_to_body

METADATA = {"environment": "math", "seed": 3, "model": "none", "samples": 1}
STORED = [
    plain_trajectory(0),
    replace(plain_trajectory(1), detail="größer", status="failed", cause="agent", reward=None),
    replace(plain_trajectory(2), domain="math/sum", message_tokens=7),
]
JOURNALLED = [plain_trajectory(index) for index in (3, 4)]
EXPECTED = [exact(record) for record in [*STORED, *JOURNALLED]]


class Files:
    """A small run and its journal, which can be damaged and put back."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "x.zarr"
        with RunStore.create(self.run, METADATA) as store:
            store.append(STORED[:2])
            store.append(STORED[2:])
        with Journal.create(journal_path(self.run)) as journal:
            journal.append("session", {"strategy": "slime"})
            for record in [*STORED, *JOURNALLED]:
                journal.append("action", {"trajectory_id": record.trajectory_id, "action_index": 0})
                journal.append(TRAJECTORY_FINISHED, trajectory_to_body(record))
        self._contents = {path: path.read_bytes() for path in self._present()}
        self.paths = sorted(self._contents)

    def _present(self) -> list[Path]:
        return [path for path in self.run.parent.rglob("*") if path.is_file()]

    def restore(self) -> None:
        for path in self._present():
            if path not in self._contents:
                path.unlink()
        self._put_back(self._contents)

    def restore_beside(self, damaged: Path) -> None:
        """Put back what one damage can have changed: the file, or its folder if it is gone."""
        changed = damaged if damaged.exists() else damaged.parent
        self._put_back([path for path in self.paths if path.is_relative_to(changed)])

    def _put_back(self, paths: Iterable[Path]) -> None:
        for path in paths:
            content = self._contents[path]
            if not path.exists() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def damage(self, chance: random.Random) -> Path:
        # The journal is one file of a hundred, and so is the root of the store.
        often = [journal_path(self.run), self.run / "zarr.json"]
        path = chance.choice(often if chance.random() < 0.2 else self.paths)
        content = bytearray(path.read_bytes())
        kind = chance.choice(["flip", "byte", "truncate", "delete", "zero", "append", "folder"])
        at = chance.randrange(len(content))
        if kind == "flip":
            content[at] ^= 1 << chance.randrange(8)
        elif kind == "byte":
            content[at] = chance.randrange(256)
        elif kind == "truncate":
            del content[at:]
        elif kind == "zero":
            content[at : at + chance.choice([1, 8, 4096])] = bytes(len(content[at : at + 4096]))
        elif kind == "append":
            content += chance.randbytes(chance.choice([1, 40]))
        path.write_bytes(content)
        if kind == "delete":
            path.unlink()
        elif kind == "folder" and path.parent != self.run.parent:
            shutil.rmtree(path.parent)
        return path


def show(run: Path) -> list[str]:
    figures = show_run(run, to_stderr=True)
    count = figures["trajectories"]
    assert figures["metadata"] == METADATA
    assert (figures["steps"], figures["tokens"]) == (3 * count, 15 * count)
    return EXPECTED[:count]


def show_each(run: Path) -> list[str]:
    count = len(StoredRun(run))
    for index in (0, count - 1):
        told = show_trajectory(run, str(index), to_stderr=True)
        assert (told["trajectory_id"], told["steps"]) == (f"t{index}", 3)
    return EXPECTED[:count]


def read_columns(run: Path) -> list[str]:
    reader = RunReader(run)
    assert reader.metadata == METADATA and reader.summary().generated_tokens == 45
    tally = Tally()
    for index in range(len(reader)):
        tally.add(reader.outline(index))
    assert tally.tokens == 45
    return [exact(record) for record in reader]


def export(run: Path) -> list[str]:
    count = export_parquet(RunReader(run), run.parent / "x.parquet")
    return EXPECTED[:count]


def resume(run: Path) -> list[str]:
    Journal.open_append(journal_path(run)).close()
    with RunStore.append_to(run) as store:
        recover(journal_path(run), store)
    for _ in JournalReader(journal_path(run), RESULTS):
        pass
    return [exact(record) for record in RunReader(run)]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_an_undamaged_run_is_read_whole(files: Files) -> None:
    assert show(files.run) == show_each(files.run) == EXPECTED
    assert read_columns(files.run) == export(files.run) == EXPECTED[:3]
    assert resume(files.run) == EXPECTED


def read_what_is_damaged(run: Path, damaged: Path) -> list[str]:
    """One column, or the root, or the journal."""
    reader = RunReader(run)
    assert reader.metadata == METADATA
    name = "/".join(damaged.relative_to(run.parent).parts[1:3])
    if name in COLUMNS:
        assert COLUMNS[name] == repr(reader.column(name).tolist())
    if damaged == journal_path(run):
        return [exact(record) for record in StoredRun(run)]
    return EXPECTED[: len(reader)]


COLUMNS: dict[str, str] = {}


@pytest.mark.slow
@pytest.mark.parametrize(("damages", "by_commands"), [(200, 50), pytest.param(1000, 150, marks=pytest.mark.long)])
def test_many_damages(files: Files, damages: int, by_commands: int) -> None:
    """A run that lost lines at the end of its journal is shorter, and otherwise right.

    The first ones are read as each command does, the others where the damage is. A damage that changes nothing that
    is read (an attribute of a column) leaves the run whole.
    """
    pytest.importorskip("pyarrow")
    reader = RunReader(files.run)
    COLUMNS.update({name: repr(reader.column(name).tolist()) for name in column_names()})
    chance = random.Random(7)
    reading: list[Callable[[Path], list[str]]] = [show, show_each, read_columns, export, resume]
    noticed = 0
    for number in range(damages):
        damaged = files.damage(chance)
        way: Callable[[Path], list[str]] = reading[number % len(reading)]
        if number >= by_commands:
            way = partial(read_what_is_damaged, damaged=damaged)
        told = f"damage {number} of {damaged.relative_to(files.run.parent)}, {way}"
        try:
            found = way(files.run)
        except BadInput as error:
            assert "\n" not in str(error) and str(files.run.parent) in str(error), told
            noticed += 1
            assert not (files.run.parent / "x.parquet").exists(), "half a file"
        except Exception as error:
            raise AssertionError(told) from error
        else:
            least = 3 if damaged.suffix == ".journal" or way not in (show, show_each, resume) else 5
            assert found == EXPECTED[: len(found)] and len(found) >= least, told
        if number >= by_commands:
            files.restore_beside(damaged)
        else:
            files.restore()
    assert noticed > damages // 3
