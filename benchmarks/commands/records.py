"""``python -m benchmarks records``: what the files of a run cost, by its size."""

from __future__ import annotations

from pathlib import Path

import click

from heddle_dask.cli.option_groups import COUNT
from heddle_dask.cli.shared_options import print_measured, shared_options, whole_numbers


@click.command("records")
@click.option("--trajectories", default="250,1000", show_default=True, help="Sizes, comma-separated.")
@click.option("--tokens", type=COUNT, default=20_000, show_default=True, help="Tokens of each trajectory.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=None,
    help="Where the runs are written, and removed again [default: that for temporary files].",
)
@shared_options
def records(trajectories: str, tokens: int, folder: Path | None, as_json: bool, seed: int) -> None:
    """Bytes of journal and store, and memory and seconds to write and read a run, without engines."""
    sizes = whole_numbers("--trajectories", trajectories, "250,1000")
    from benchmarks.run_files import as_json as files_json
    from benchmarks.run_files import measure_run_files

    rows = []
    for row in measure_run_files(sizes, tokens, folder):
        rows.append(row)
        lines = [
            f"{row.trajectories} trajectories of {row.tokens} tokens",
            f"  journal: {_mb(row.results_bytes)} of results and {_mb(row.control_bytes)} of the controller written, "
            f"{_mb(row.journal_peak_bytes)} at its longest, {_mb(row.journal_bytes)} at the end",
            f"  store: {_mb(row.store_bytes)}",
        ]
        for name in ("write", "show", "append", "resume"):
            seconds, peak_bytes = getattr(row, f"{name}_s"), getattr(row, f"{name}_peak_bytes")
            lines.append(f"  {name}: {seconds:.1f} s, {_mb(peak_bytes)} of memory")
        click.echo("\n".join(lines), err=as_json)
    if as_json:
        print_measured(files_json(rows))


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
