"""``python -m benchmarks slurm``: what a batch system adds to a rollout."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.tables import print_measured
from heddle_dask.cli.shared_options import COUNT, shared_options


@click.command("slurm")
@click.option(
    "--cluster", required=True, type=click.Path(path_type=Path), help="Cluster file with SLURM groups."
)
@click.option("--model", default=None, help="Directory with a tokenizer [default: the shipped tiny-agent].")
@click.option("--repeats", default=3, show_default=True, type=COUNT, help="Starts, and losses of a job.")
@shared_options
def slurm(cluster: Path, model: str | None, repeats: int, as_json: bool, seed: int) -> None:
    """Seconds from an accepted job to its first LLM step, by phase; and what the loss of a job costs."""
    from benchmarks.slurm import measure_loss, measure_start, summary
    from heddle_dask.cli.engine_option import chosen_model
    from heddle_dask.live.clusters.slurm.cluster_file import read_cluster_file

    plan = read_cluster_file(cluster)
    model = chosen_model(model, "emulated")
    shared = plan.logs or plan.shared or Path.cwd()
    shared.mkdir(parents=True, exist_ok=True)
    starts, losses = [], []
    for number in range(repeats):
        with tempfile.TemporaryDirectory(prefix="heddle-bench-", dir=shared) as directory:
            there = replace(plan, logs=Path(directory) / "logs")
            starts.append(asyncio.run(measure_start(there, model, Path(directory) / "start.zarr")))
            click.echo(f"start {number + 1} of {repeats}: {starts[-1].total:.1f} s", err=True)
            losses.append(asyncio.run(measure_loss(there, model, Path(directory) / "loss.zarr")))
            click.echo(f"loss {number + 1} of {repeats}: {losses[-1].recovered_s:.1f} s", err=True)
    result = summary(starts, losses)
    click.echo("phase       median s (range)", err=as_json)
    for row in result["rows"]:
        click.echo(
            f"{row['phase']:10s}  {row['median_s']:8.2f} ({row['least_s']:.2f}-{row['most_s']:.2f})",
            err=as_json,
        )
    click.echo(
        "a killed job: steps in flight, sampled again; s until noticed, recovered, replaced", err=as_json
    )
    for loss in losses:
        times = (loss.noticed_s, loss.recovered_s, loss.replaced_s)
        seconds = " ".join(f"{time_s:6.2f}" for time_s in times)
        click.echo(f"{loss.in_flight:3d} {loss.again:3d}  {seconds}", err=as_json)
    if as_json:
        print_measured(result)
