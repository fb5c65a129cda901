"""``python -m benchmarks report``: what a report of a run costs, by its size."""

from __future__ import annotations

from pathlib import Path

import click

from heddle_dask.cli.shared_options import print_measured, shared_options, whole_numbers


@click.command("report")
@click.option("--trajectories", default="1000,10000", show_default=True, help="Sizes, comma-separated.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=None,
    help="Where the runs are written, and removed again [default: that for temporary files].",
)
@shared_options
def report(trajectories: str, folder: Path | None, as_json: bool, seed: int) -> None:
    """Seconds, memory and bytes of `heddle show --html` and `--perfetto`, without engines."""
    sizes = whole_numbers("--trajectories", trajectories, "1000,10000")
    from benchmarks.report import as_json as report_json
    from benchmarks.report import measure_reports

    rows = []
    for row in measure_reports(sizes, seed=seed, folder=folder):
        rows.append(row)
        click.echo(
            f"{row.trajectories:,} trajectories, {row.steps:,} steps, {row.events:,} events: show {row.show_s:.1f} s\n"
            f"  report: {row.html_s:.1f} s ({row.html_cpu_s:.1f} s of CPU), {row.html_bytes / 1e6:.1f} MB, "
            f"{row.html_peak_bytes / 2**20:,.0f} MiB of memory\n"
            f"  trace: {row.perfetto_s:.1f} s, {row.perfetto_bytes / 1e6:.1f} MB",
            err=as_json,
        )
    if as_json:
        print_measured(report_json(rows))
