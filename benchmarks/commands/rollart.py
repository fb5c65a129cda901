"""``python -m benchmarks rollart``: RollArt's evaluation in virtual time."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.row_file import ROWS_OUT
from heddle_dask.cli.option_groups import SEEDS
from heddle_dask.cli.shared_options import shared_options


@click.command("rollart")
@click.option(
    "--experiment",
    default="all",
    show_default=True,
    help="Names by commas; `list` prints them.",
)
@SEEDS
@ROWS_OUT
@click.option("--kept", is_flag=True, help="Print the tables of the rows in --out, and run nothing.")
@shared_options
def rollart(experiment: str, seeds: int, out: Path | None, kept: bool, as_json: bool, seed: int) -> None:
    """RollArt's experiments: training steps of synchronous and asynchronous arms, in virtual time."""
    from benchmarks.rollart.experiments import EXPERIMENTS

    EXPERIMENTS.run(experiment, range(seed, seed + seeds), out, as_json=as_json, kept=kept)
