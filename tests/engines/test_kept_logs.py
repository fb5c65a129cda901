"""Logs of failed starts are found after their cluster has gone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from heddle_dask.engines import kept_logs
from heddle_dask.engines.kept_logs import kept_log


def test_a_log_among_temporary_files_is_copied_and_the_newest_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(kept_logs, "KEPT", 2)
    log = tmp_path / "tmp" / "cluster" / "engine.log"
    log.parent.mkdir(parents=True)
    log.write_text("no kernel image")
    copies = [kept_log(log, mark) for mark in ("a", "b", "c")]
    log.unlink()
    assert [copy.exists() for copy in copies] == [False, True, True]
    assert copies[-1].read_text() == "no kernel image" and copies[-1].parent.stat().st_mode & 0o77 == 0


def test_a_log_beside_the_run_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    log = tmp_path / "run.logs" / "engine.log"
    assert kept_log(log, "a") == log
    assert kept_log(tmp_path / "tmp" / "none.log", "a") == tmp_path / "tmp" / "none.log", "nothing to copy"
