"""The benchmark ``predictor``: how good and how fast the prediction of remaining work is, on recorded trajectories."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

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
@shared_options
def predictor(traces: tuple[Path, ...], folds: int, points: str, as_json: bool, seed: int) -> None:
    """Recall of the longest 20 %, correlation, error, coverage, makespan and milliseconds, against baselines."""
    # XGBoost takes a second to import.
    from benchmarks.predictor import as_json as predictor_json
    from benchmarks.predictor import measure_predictor
    from heddle_dask.workloads.recorded import trace_file

    # All first: a trace that is not there is refused before the first is measured.
    traces = tuple(trace_file(trace) for trace in traces)
    for trace in traces:
        if not trace.is_file():
            raise BadInput(f"--trace {str(trace)!r}: there is no such file")
    reports = []
    for trace in traces:
        report = measure_predictor(
            trace,
            folds=folds,
            seed=seed,
            as_asked=points == "asked",
            on_progress=lambda message: click.echo(message, err=True),
        )
        reports.append(report)
        for line in table(report):
            click.echo(line, err=as_json)
    if as_json:
        files = [predictor_json(report) for report in reports]
        print_measured({"folds": folds, "seed": seed, "points": points, "files": files})


def table(report: PredictorReport) -> list[str]:
    """The lines of one file's table."""
    lines = [
        f"{report.trace}: {report.trajectories} trajectories ({report.censored} cut off), {report.groups} groups",
        "steps  method          trajectories  recall  pearson   rank  error  q90 covers",
    ]
    for row in report.scores:
        score = row.score
        lines.append(
            f"{row.steps_finished:5d}  {row.method:14s}  {row.trajectories:12d}  {_shown(score.recall):>6s}  "
            f"{_shown(score.pearson):>7s}  {_shown(score.rank):>5s}  {_shown(score.error):>5s}  "
            f"{_shown(score.coverage):>10s}"
        )
    lines.append("order                    makespan / FCFS     band")
    for order in report.orders:
        lines.append(f"{order.order:24s} {order.share_of_fcfs:15.3f}     {order.low:.3f} to {order.high:.3f}")
    lines.append("rows in one call     ms   trees alone ms")
    for latency in report.latency:
        lines.append(f"{latency.rows:16d} {latency.call_ms:6.2f} {_shown(latency.trees_ms):>16s}")
    return lines


def _shown(value: float) -> str:
    return "-" if value != value else f"{value:.2f}"
