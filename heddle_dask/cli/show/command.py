"""``heddle show``: its options."""

from __future__ import annotations

from pathlib import Path

import click

from heddle_dask.cli.shared_options import print_json, shared_options


@click.command("show")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--trajectory", default=None, metavar="ID|INDEX", help="Show this one in full.")
@shared_options
def show(run: Path, trajectory: str | None, as_json: bool, seed: int) -> None:
    """Show a stored run, or one trajectory of it; changes nothing."""
    from heddle_dask.cli.show.report import show_run, show_trajectory

    result = (
        show_run(run, to_stderr=as_json)
        if trajectory is None
        else show_trajectory(run, trajectory, to_stderr=as_json)
    )
    if as_json:
        print_json(result)
