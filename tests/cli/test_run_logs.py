"""Logs beside a run: who keeps which, and how long they grow. Without a cluster."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from heddle_dask.cli.rollout.run_logs import KEPT_BYTES, SESSIONS_KEPT, RunLogs, bound_logs, log_tail
from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.inputs.rollout_inputs import WriteMode
from heddle_dask.records.store import RunStore


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run.zarr"


def session(out: Path, mode: WriteMode, text: str, *, makes_the_run: bool = False) -> Path:
    """One session that writes a log, and the store if it gets that far."""

    async def write() -> Path:
        logs = RunLogs(out, mode)
        async with logs.kept() as path:
            (path / "scheduler.log").write_text(text)
            if makes_the_run:
                RunStore.create(out, {}, overwrite=mode == "overwrite").close()
        return path

    return asyncio.run(write())


def kept(out: Path) -> list[str]:
    return [path.read_text() for path in sorted(out.with_suffix(".logs").rglob("*.log"))]


def test_sessions_that_add_to_a_run_are_numbered_and_kept(out: Path) -> None:
    first = session(out, "create", "one", makes_the_run=True)
    second = session(out, "append", "two")
    third = session(out, "resume", "three")
    assert [path.name for path in (first, second, third)] == ["session-1", "session-2", "session-3"]
    assert kept(out) == ["one", "two", "three"]
    for path in (first, first.parent):
        assert path.stat().st_mode & 0o777 == 0o700


def test_logs_of_a_replaced_run_go_with_it_and_those_of_a_failed_start_stay(out: Path) -> None:
    session(out, "create", "failed start")
    session(out, "create", "first run", makes_the_run=True)
    assert kept(out) == ["first run"]
    session(out, "overwrite", "engines do not start")
    assert kept(out) == ["first run", "engines do not start"]
    session(out, "overwrite", "second run", makes_the_run=True)
    assert kept(out) == ["second run"]


def test_sessions_are_bounded(out: Path) -> None:
    for number in range(SESSIONS_KEPT + 3):
        path = session(out, "append", f"{number}")
    assert path.name == f"session-{SESSIONS_KEPT + 3}" and len(kept(out)) == SESSIONS_KEPT


def test_logs_are_kept_when_the_session_fails(out: Path) -> None:
    async def fail() -> None:
        async with RunLogs(out, "create").kept() as path:
            (path / "scheduler.log").write_text("why")
            raise BadInput("no engine")

    with pytest.raises(BadInput, match="no engine"):
        asyncio.run(fail())
    assert kept(out) == ["why"]


def test_a_long_log_keeps_its_end_and_its_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "engine.log"
    path.parent.mkdir()
    with path.open("ab", buffering=0) as writer:
        writer.write(b"old\n" * (KEPT_BYTES // 2))
        writer.write(b"last\n")
        bound_logs(tmp_path, 4 * KEPT_BYTES)
        assert path.stat().st_size == 2 * KEPT_BYTES + 5
        bound_logs(tmp_path)
        assert path.stat().st_size == KEPT_BYTES
        writer.write(b"after\n")
    assert path.stat().st_size == KEPT_BYTES + 6
    assert log_tail(path).endswith("old | last | after")


def test_logs_of_a_killed_session_are_bounded_by_the_next(out: Path) -> None:
    killed = out.with_suffix(".logs") / "session-1"
    killed.mkdir(parents=True)
    (killed / "engine.log").write_bytes(b"x" * (KEPT_BYTES + 1))
    assert session(out, "append", "next").name == "session-2"
    assert (killed / "engine.log").stat().st_size == KEPT_BYTES


def test_what_is_in_the_place_of_the_directory_is_left_alone(out: Path) -> None:
    logs = out.with_suffix(".logs")
    logs.write_text("mine")
    with pytest.raises(BadInput, match="is no directory"):
        RunLogs(out, "create")
    logs.unlink()
    logs.symlink_to(out.parent)
    with pytest.raises(BadInput, match="is no directory"):
        RunLogs(out, "create")
    logs.unlink()
    (logs / "notes").mkdir(parents=True)
    (logs / "notes" / "mine.txt").write_text("mine")
    session(out, "create", "run", makes_the_run=True)
    assert (logs / "notes" / "mine.txt").read_text() == "mine"


def test_a_directory_that_cannot_be_made_is_one_line(out: Path) -> None:
    logs = RunLogs(out, "create")
    out.with_suffix(".logs").mkdir()
    (out.with_suffix(".logs") / "session-1").write_text("")

    async def open_logs() -> None:
        async with logs.kept():
            pass

    with pytest.raises(BadInput, match=f"cannot write logs to .*session-1: {os.strerror(17)}"):
        asyncio.run(open_logs())


def test_a_log_that_cannot_be_cut_is_not_what_ends_the_run(tmp_path: Path) -> None:
    async def fail() -> None:
        async with RunLogs(tmp_path / "x.zarr", "create").kept() as path:
            (path / "folder.log").mkdir()  # as a read-only disk: it cannot be opened for writing
            raise BadInput("no space")

    with pytest.raises(BadInput, match="no space"):
        asyncio.run(fail())
