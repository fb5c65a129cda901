"""The files of one session: when they are opened, and what they keep."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from heddle_dask.live.driver.rollout_inputs import Output
from heddle_dask.live.driver.run_files import RunFiles
from heddle_dask.live.driver.run_writer import journal_path
from heddle_dask.records.journal import read_journal
from heddle_dask.records.store import RunReader


def facts() -> dict[str, Any]:
    return {"environment": "mine", "seed": 3}


def test_lines_that_come_before_the_journal_follow_the_session_line(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"

    async def body() -> None:
        files = RunFiles(Output(out, metadata={"tasks": 4, "seed": 5}), facts)
        files.keep_lines(["first"])
        files.keep_lines(["second"])
        files.open()
        files.keep_lines(["third"])
        assert files.begin_batch() == 0
        await files.close()

    asyncio.run(body())
    lines = [(kind, body) for kind, body in read_journal(journal_path(out))]
    described = {"environment": "mine", "seed": 5, "tasks": 4}
    assert lines == [
        ("session", described),
        ("control", {"lines": ["first", "second"]}),
        ("control", {"lines": ["third"]}),
    ]
    assert described.items() <= RunReader(out).metadata.items()


def test_only_new_files_are_discarded(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"

    async def body() -> None:
        refused = RunFiles(Output(out), facts)
        refused.open()
        refused.discard_if_new()
        assert list(tmp_path.iterdir()) == []
        for mode in ("create", "append", "overwrite"):
            files = RunFiles(Output(out, mode), facts)
            assert files.replaces_a_run == (mode == "overwrite")
            files.open()
            if mode != "create":
                files.discard_if_new()
                assert out.exists()
            await files.close()

    asyncio.run(body())


def test_without_output_nothing_is_kept() -> None:
    async def body() -> None:
        files = RunFiles(None, facts)
        files.keep_lines(["early"])
        files.open()
        files.journal("step", {})
        files.discard_if_new()
        await files.store()
        await files.close()
        assert (files.writer, files.begin_batch(), files.replaces_a_run) == (None, None, False)
        assert files.unfinished(["attempt"]) == ["attempt"]  # type: ignore[list-item]

    asyncio.run(body())
