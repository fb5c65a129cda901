"""``heddle bench degrees``: how long the search for model-parallel degrees takes, and what it finds."""

from __future__ import annotations

import click

from heddle_dask.cli.shared_options import print_measured, shared_options

PROFILES = "qwen3-8b-h100,qwen3-14b-h100,qwen3-32b-h100"


@click.command("degrees")
@click.option("--profiles", default=PROFILES, show_default=True, help="Shipped profiles, comma-separated.")
@click.option("--trajectories", type=click.IntRange(min=1), default=6400, show_default=True)
@click.option("--gpus", type=click.IntRange(min=1), default=64, show_default=True, help="In nodes of 8.")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Median of so many."
)
@shared_options
def degrees(profiles: str, trajectories: int, gpus: int, repeats: int, as_json: bool, seed: int) -> None:
    """Seconds of the search, the chosen degrees, and their makespan against each uniform degree."""
    from heddle_dask.benchmarks.degrees import as_json as degrees_json
    from heddle_dask.benchmarks.degrees import measure_degrees

    click.echo(
        "profile         search s  tried  chosen                  makespan s   gain  walk/best  uniform s",
        err=as_json,
    )
    rows = []
    names = [name.strip() for name in profiles.split(",")]
    for row in measure_degrees(names, trajectories, gpus, seed=seed, repeats=repeats):
        rows.append(row)
        chosen = " + ".join(f"{count}x{degree}" for degree, count in row.degrees.items())
        uniform = ", ".join(f"{d}: {'-' if s is None else f'{s:.1f}'}" for d, s in row.uniform_s.items())
        click.echo(
            f"{row.profile:14s}  {row.search_s:8.3f}  {row.tried:5d}  {chosen:22s}  {row.makespan_s:10.1f}  "
            f"{row.gain:5.3f}  {row.walk_over_best:9.3f}  {uniform}",
            err=as_json,
        )
    if as_json:
        print_measured(degrees_json(rows))
