"""``python -m benchmarks dashboard``: what the page of the dashboard costs the scheduler, and a look at it."""

from __future__ import annotations

import asyncio
import time
from importlib.util import find_spec

import click

from benchmarks.tables import print_measured_rows
from heddle_dask.cli.shared_options import COUNT, shared_options, whole_numbers
from heddle_dask.core.errors import BadInput


@click.command("dashboard")
@click.option("--trajectories", default="10,500,10000", show_default=True, help="Sizes, comma-separated.")
@click.option("--serve", is_flag=True, help="Measure nothing: serve the page of the first size until Ctrl-C.")
@click.option("--speed", type=COUNT, default=10, show_default=True, help="Simulated seconds per second, served.")
@shared_options
def dashboard(trajectories: str, serve: bool, speed: int, as_json: bool, seed: int) -> None:
    """CPU milliseconds that the scheduler needs for the dashboard's page, with a simulated rollout."""
    sizes = whole_numbers("--trajectories", trajectories, "10,500")
    if find_spec("bokeh") is None:
        raise BadInput("python -m benchmarks dashboard needs bokeh: install it with `pip install bokeh`")
    if serve:
        asyncio.run(_serve(sizes[0], speed, seed))
        return
    from benchmarks.dashboard import COLUMNS, measure_dashboard

    print_measured_rows(measure_dashboard(sizes, seed=seed), COLUMNS, as_json=as_json)


async def _serve(trajectories: int, speed: int, seed: int) -> None:
    from benchmarks.dashboard_demo import PlayedRun, demo_dashboard
    from benchmarks.dashboard_run import simulated_run

    pairs = simulated_run(trajectories, seed)
    began_s = time.monotonic()
    run = PlayedRun(pairs, lambda: (time.monotonic() - began_s) * speed)
    async with demo_dashboard(run) as url:
        click.echo(f"{url} shows a simulated rollout of {trajectories} trajectories; Ctrl-C ends it", err=True)
        await asyncio.Event().wait()
