"""``heddle bench rollart``: RollArt's evaluation in virtual time."""

from __future__ import annotations

import json
from pathlib import Path

import click

from heddle_dask.cli.option_groups import SEEDS
from heddle_dask.cli.shared_options import check_writable, print_measured, shared_options, write_file


@click.command("rollart")
@click.option(
    "--experiment",
    default="all",
    show_default=True,
    help="Names by commas; `list` prints them.",
)
@SEEDS
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="JSON file for the rows.",
)
@shared_options
def rollart(experiment: str, seeds: int, out: Path | None, as_json: bool, seed: int) -> None:
    """RollArt's experiments: training steps of synchronous and asynchronous arms, in virtual time."""
    from heddle_dask.benchmarks.rollart.arms import TrainingBench
    from heddle_dask.benchmarks.rollart.experiments import EXPERIMENTS, about, chosen
    from heddle_dask.benchmarks.rollart.rows import RollartRow, rollart_tables

    if experiment == "list":
        for name in EXPERIMENTS:
            click.echo(f"{name:12}  {about(name)}")
        return
    names = chosen(experiment)
    if out is not None:
        check_writable("--out", out)
    bench = TrainingBench(range(seed, seed + seeds), lambda line: click.echo(line, err=True))
    rows: list[RollartRow] = []
    for name in names:
        rows += EXPERIMENTS[name](bench)
        if out is not None:
            write_file("--out", out, json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    for line in rollart_tables(rows):
        click.echo(line, err=as_json)
    if as_json:
        print_measured({"rows": [row.as_json() for row in rows]})
