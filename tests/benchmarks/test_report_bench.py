"""The benchmark of reports writes runs that the report can tell all about."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import measure_reports, write_run
from heddle_dask.cli.show.report import empty_figures
from heddle_dask.cli.stored_run import StoredRun
from heddle_dask.views.accounts import Phase
from heddle_dask.views.report.run_report import unknown_notes


def test_the_written_run_has_everything_that_a_report_shows(tmp_path: Path) -> None:
    steps, events = write_run(tmp_path / "run.zarr", 40, seed=1)
    run = StoredRun(tmp_path / "run.zarr")
    figures = empty_figures(run, over_time=True)
    for record in run.outlines():
        figures.add(record)
    assert len(figures.rows) == 40 and sum(row.steps for row in figures.rows) == steps
    assert not unknown_notes(figures) and figures.sessions[0].events == events
    for phase in (
        Phase.ADMISSION,
        Phase.LLM_QUEUE,
        Phase.PREFILL,
        Phase.DECODE,
        Phase.TOOL_QUEUE,
        Phase.TOOL,
    ):
        assert figures.totals_ns[phase] > 0
    assert figures.sessions[0].moves and len(figures.sessions[0].predictions) == 40


@pytest.mark.slow
@pytest.mark.long
def test_a_small_measurement(tmp_path: Path) -> None:
    (row,) = measure_reports([60], seed=0, folder=tmp_path)
    assert row.trajectories == 60 and row.html_bytes > 50_000 and row.perfetto_bytes > 50_000
    assert row.html_cpu_s > 0 and row.html_peak_bytes > 2**20
    assert row.trajectories and not list(tmp_path.iterdir())
