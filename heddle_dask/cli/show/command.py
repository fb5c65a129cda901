"""``heddle show``: its options."""

from __future__ import annotations

from pathlib import Path

import click

from heddle_dask.cli.shared_options import check_writable, print_json, shared_options
from heddle_dask.core.errors import BadInput

_FILE = click.Path(path_type=Path)


@click.command("show")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--trajectory", default=None, metavar="ID|INDEX", help="Show this one in full.")
@click.option("--failed", is_flag=True, help="List what did not complete: id, status, cause, message.")
@click.option("--html", type=_FILE, default=None, help="Write a report: one file that stands alone.")
@click.option("--perfetto", type=_FILE, default=None, help="Write a trace for ui.perfetto.dev.")
@shared_options
def show(
    run: Path,
    trajectory: str | None,
    failed: bool,
    html: Path | None,
    perfetto: Path | None,
    as_json: bool,
    seed: int,
) -> None:
    """Show a stored run, one trajectory of it, those that failed, or a training; changes nothing."""
    if failed and trajectory is not None:
        raise BadInput("--failed and --trajectory exclude each other: use one")
    for option, path in (("--html", html), ("--perfetto", perfetto)):
        if path is not None and (failed or trajectory is not None):
            raise BadInput(f"{option} is of the whole run: leave --failed and --trajectory away")
        if path is not None:
            check_writable(option, path)
    if (run / "run.json").is_file():
        if failed or trajectory is not None or html is not None or perfetto is not None:
            raise BadInput(f"{run} is a training: give its trajectories, {run / 'rollout.zarr'}, to this option")
        from heddle_dask.cli.show.training_report import show_training

        result = show_training(run, to_stderr=as_json)
        if as_json:
            print_json(result)
        return
    from heddle_dask.cli.show.report import show_failed, show_run, show_trajectory

    if failed:
        result = show_failed(run, to_stderr=as_json)
    elif trajectory is not None:
        result = show_trajectory(run, trajectory, to_stderr=as_json)
    else:
        result = show_run(run, to_stderr=as_json, html=html, perfetto=perfetto)
    if as_json:
        print_json(result)
