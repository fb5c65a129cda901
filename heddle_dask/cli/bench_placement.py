"""``heddle bench placement``: how long a plan of a whole batch takes, by algorithm."""

from __future__ import annotations

import click

from heddle_dask.cli.shared_options import print_measured, shared_options
from heddle_dask.cli.whole_numbers import whole_numbers
from heddle_dask.core.errors import BadInput


@click.command("placement")
@click.option(
    "--trajectories", default="100,400,1600,6400", show_default=True, help="Counts, comma-separated."
)
@click.option("--engines", default="4,16", show_default=True, help="Counts, comma-separated.")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Median of so many."
)
@click.option(
    "--dp-most",
    type=click.IntRange(min=0),
    default=1600,
    show_default=True,
    help="Largest count for which Eq. 3 runs as printed (quadratic: most of a minute at 6,400).",
)
@shared_options
def placement(trajectories: str, engines: str, repeats: int, dp_most: int, as_json: bool, seed: int) -> None:
    """Milliseconds of the paper's presorted DP, of its equivalents, and of the plan by work."""
    counts = whole_numbers("--trajectories", trajectories, "400,1600")
    numbers = whole_numbers("--engines", engines, "4,16")
    if min(numbers) > max(counts):
        raise BadInput(f"--engines {engines}: use at least one count that is not above --trajectories")
    from heddle_dask.benchmarks.placement import as_json as placement_json
    from heddle_dask.benchmarks.placement import measure_placement

    click.echo(
        "trajectories  engines     DP ms  cut ms  makespan ms   ratio  unlike ms  order/best  work ms  "
        "Eq. 3/work  bound share",
        err=as_json,
    )
    rows = []
    for row in measure_placement(counts, numbers, seed=seed, repeats=repeats, dp_most=dp_most):
        rows.append(row)
        dp = "-" if row.dp_ms is None else f"{row.dp_ms:.0f}"
        ratio = "-" if row.dp_over_makespan is None else f"{row.dp_over_makespan:.0f}"
        click.echo(
            f"{row.trajectories:12d}  {row.engines:7d}  {dp:>8}  {row.cut_ms:6.1f}  {row.makespan_ms:11.3f}  "
            f"{ratio:>6}  {row.unlike_ms:9.2f}  {row.fixed_order_over_best:10.3f}  {row.work_ms:7.1f}  "
            f"{row.eq3_over_work:10.3f}  {row.work_bound_share:11.3f}",
            err=as_json,
        )
    if as_json:
        print_measured(placement_json(rows))
