"""``python -m benchmarks scale``: CPU time and memory of a simulated rollout, by size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from heddle_dask.cli.shared_options import print_measured, shared_options, whole_numbers

if TYPE_CHECKING:
    from benchmarks.scale import ScaleRow


@click.command("scale")
@click.option(
    "--trajectories",
    default="1600,6400,25600,102400",
    show_default=True,
    help="Sizes, comma-separated; an engine of one GPU for each hundred.",
)
@click.option(
    "--presets", default="heddle,slime", show_default=True, help="Comma-separated; the oracle predicts."
)
@shared_options
def scale(trajectories: str, presets: str, as_json: bool, seed: int) -> None:
    """CPU seconds and peak memory of a simulated rollout, each size in a process of its own."""
    sizes = whole_numbers("--trajectories", trajectories, "1600,6400")
    from benchmarks.scale import as_json as scale_json
    from benchmarks.scale import measure_scale

    rows: list[ScaleRow] = []
    for row in measure_scale([name.strip() for name in presets.split(",")], sizes, seed=seed):
        if not rows:
            click.echo(
                "preset        trajectories  GPUs    steps   events  makespan s    CPU s   peak MiB  of n log n",
                err=as_json,
            )
        rows.append(row)
        click.echo(
            f"{row.preset:13} {row.trajectories:12d}  {row.gpus:4d}  {row.steps:7d}  {row.events:7d}  "
            f"{row.makespan_s:10.1f}  {row.cpu_s:7.2f}  {row.peak_bytes / 2**20:9.0f}  {row.growth:10.2f}",
            err=as_json,
        )
    if as_json:
        print_measured(scale_json(rows))
