"""The benchmark ``predictor``: how good and how fast the prediction of remaining work is, on recorded trajectories."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.code_digest import code_digest
from benchmarks.row_file import ROWS_OUT
from benchmarks.runner import runner_of
from benchmarks.tables import print_measured
from heddle_dask.cli.shared_options import WholeNumber, shared_options
from heddle_dask.core.errors import BadInput

if TYPE_CHECKING:
    from benchmarks.predictor import PredictorReport


@click.command("predictor")
@click.option(
    "--trace",
    "traces",
    type=click.Path(path_type=Path),
    required=True,
    multiple=True,
    help="Recorded trace, NAME or FILE (JSON lines, plain or gzip); repeatable.",
)
@click.option(
    "--folds",
    type=WholeNumber(2),
    default=5,
    show_default=True,
    help="Parts of the groups; each is predicted by a model trained without it.",
)
@click.option(
    "--points",
    type=click.Choice(["recorded", "asked"]),
    default="recorded",
    show_default=True,
    help="Known at a prediction: all that was recorded before the next step, or what a session has when it asks.",
)
@ROWS_OUT
@shared_options
def predictor(traces: tuple[Path, ...], folds: int, points: str, out: Path | None, as_json: bool, seed: int) -> None:
    """Recall of the longest 20 %, correlation, error, coverage, makespan and milliseconds, against baselines."""
    # XGBoost takes a second to import.
    from benchmarks.predictor import PredictorJob, PredictorReport, measure_predictor
    from heddle_dask.workloads.recorded import trace_file

    # All first: a trace that is not there is refused before the first is measured.
    traces = tuple(trace_file(trace) for trace in traces)
    for trace in traces:
        if not trace.is_file():
            raise BadInput(f"--trace {str(trace)!r}: there is no such file")
    runner = runner_of(out, code_digest())
    files = []
    for trace in traces:
        job = PredictorJob(str(trace), folds, seed, points)
        (report,) = runner.figures(
            PredictorReport, measure_predictor, [job], lambda job, report: f"{report.trace}: measured"
        )
        files.append(asdict(report))
        for line in table(report):
            click.echo(line, err=as_json)
    if as_json:
        print_measured({"folds": folds, "seed": seed, "points": points, "files": files})


def table(report: PredictorReport) -> list[str]:
    """The lines of one file's table."""
    lines = [
        f"{report.trace}: {report.trajectories} trajectories ({report.censored} cut off), {report.groups} groups",
        "steps  method          trajectories  recall  pearson   rank  error  q90 covers",
    ]
    for row in report.rows:
        scores = (
            f"{_shown(row[name]):>{width}s}"
            for name, width in (("recall", 6), ("pearson", 7), ("rank", 5), ("error", 5), ("coverage", 10))
        )
        lines.append(f"{row['steps_finished']:5d}  {row['method']:14s}  {row['trajectories']:12d}  {'  '.join(scores)}")
    lines.append("order                    makespan / FCFS     band")
    for order in report.orders:
        lines.append(
            f"{order['order']:24s} {order['share_of_fcfs']:15.3f}     {order['low']:.3f} to {order['high']:.3f}"
        )
    lines.append("rows in one call     ms   trees alone ms")
    for latency in report.latency:
        lines.append(f"{latency['rows']:16d} {latency['call_ms']:6.2f} {_shown(latency['trees_ms']):>16s}")
    return lines


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
