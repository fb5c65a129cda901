"""``heddle show``: where each second went, report and trace, of runs that are whole, killed or without journal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from worlds.run_builders import journal_lines, timed_trajectory

from heddle_dask.cli.main import heddle
from heddle_dask.live.driver.files.run_writer import journal_path
from heddle_dask.records.journal import Journal
from heddle_dask.records.store import RunStore
from heddle_dask.records.trajectory import TRAJECTORY_FINISHED, TrajectoryRecord, trajectory_to_body


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _show(*arguments: object) -> Result:
    return CliRunner().invoke(heddle, ["show", *map(str, arguments)], prog_name="heddle")


def _shown(*arguments: object) -> dict[str, Any]:
    result = _show(*arguments, "--json")
    assert result.exit_code == 0, result.output
    shown: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return shown


def _run(stored: int, journalled: int = 0, with_control: bool = True, **metadata: object) -> Path:
    path = Path("run.zarr")
    records: list[TrajectoryRecord] = [timed_trajectory(number) for number in range(stored + journalled)]
    store = RunStore.create(path, {"environment": "math", "strategy": "heddle", **metadata})
    if stored:
        store.append(records[:stored])
    store.close()
    with Journal.create(journal_path(path)) as journal:
        journal.append("session", {"strategy": "heddle"})
        if with_control:
            journal.append("control", {"lines": journal_lines(records)})
        for record in records[stored:]:
            journal.append(TRAJECTORY_FINISHED, trajectory_to_body(record))
    return path


def test_the_terminal_and_the_json_tell_where_each_second_went() -> None:
    path = _run(4)
    said = _show(path)
    assert said.exit_code == 0 and "where each second went" in said.output
    for title in (
        "admission",
        "LLM queue",
        "exposed migration",
        "prefill",
        "decode",
        "tool queue",
        "driver and rest",
    ):
        assert title in said.output
    assert "took longest, 10.5 s; " in said.output
    seconds = _shown(path)["seconds"]
    parts = {name: value for name, value in seconds.items() if name.endswith("_s")}
    assert parts.pop("earlier_sessions_s") == 0.0
    assert parts.pop("total_s") == pytest.approx(sum(parts.values())) == 42.0
    assert seconds["admission_unknown"] == 0


def test_one_trajectory_tells_where_its_seconds_went() -> None:
    shown = _shown(_run(2), "--trajectory", "t1")
    assert shown["seconds_by_phase"] == {
        "admission": 1.0, "llm_queue": 1.0, "migration": 0.5, "prefill": 1.5, "decode": 3.0,
        "tool_queue": 0.75, "tool": 2.25, "driver": 0.5,
    }  # fmt: skip
    assert "seconds_by_phase" in _show("run.zarr", "--trajectory", "t1").output


def test_a_report_and_a_trace_of_a_run_whose_driver_was_killed() -> None:
    path = _run(2, journalled=2)
    shown = _shown(path, "--html", "report.html", "--perfetto", "run.pftrace")
    assert (shown["stored"], shown["recovered"], shown["html"]) == (2, 2, "report.html")
    assert shown["seconds"]["total_s"] == 42.0 and shown["perfetto"] == "run.pftrace"
    page = Path("report.html").read_text(encoding="utf-8")
    assert "2 of these trajectories are only in the journal" in page
    for number in range(4):
        assert f'["t{number}","completed"' in page
    assert Path("run.pftrace").stat().st_size > 1000
    assert not list(Path().glob(".*.partial"))


def test_a_run_without_journal() -> None:
    path = _run(3)
    journal_path(path).unlink()
    shown = _shown(path, "--html", "report.html")
    assert shown["seconds"]["admission_unknown"] == 3 and shown["seconds"]["admission_s"] == 0.0
    assert "The wait for admission is unknown for 3 of 3" in Path("report.html").read_text(encoding="utf-8")
    assert "The wait for admission is unknown for 3 of 3" in " ".join(_show(path).output.split())


def test_two_sessions_without_their_journal_have_no_common_clock() -> None:
    path = _run(3, with_control=False, sessions=2)
    _shown(path, "--html", "report.html")
    assert "not drawn over time" in Path("report.html").read_text(encoding="utf-8")


def test_an_older_report_is_replaced() -> None:
    path = _run(1)
    Path("report.html").write_text("old")
    _shown(path, "--html", "report.html")
    assert Path("report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--html", "no/such/place.html"), "--html no/such/place.html: No such file or directory"),
        (("--perfetto", "."), "--perfetto .: Is a directory"),
        (("--html", "x.html", "--failed"), "--html is of the whole run"),
        (("--perfetto", "x.html", "--trajectory", "0"), "--perfetto is of the whole run"),
    ],
)
def test_files_that_cannot_be_written_are_refused_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    result = _show(_run(1), *arguments)
    assert result.exit_code == 2 and said in result.stderr and len(result.stderr.splitlines()) == 1
    assert not Path("x.html").exists()


def test_lines_of_another_version_are_refused_in_one_line() -> None:
    path = _run(1, with_control=False)
    with Journal.open_append(journal_path(path)) as journal:
        journal.append("control", {"lines": [[["TrajectorySubmitted", 1.0], []]]})
    result = _show(path)
    assert result.exit_code == 2 and "does not know: use the version that wrote it" in result.stderr
    assert len(result.stderr.splitlines()) == 1
