"""``python -m benchmarks decisions``: CPU time of the controller, by kind of event."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from heddle_dask.cli.shared_options import COUNT, WholeNumber, print_measured, shared_options, whole_numbers


@click.command("decisions")
@click.option(
    "--presets",
    default="heddle,heddle:admission=unlimited,heddle-paper,slime,verl",
    show_default=True,
    help="preset:part=name:…, comma-separated.",
)
@click.option("--engines", default="16,64", show_default=True, help="Counts, comma-separated.")
@click.option(
    "--trajectories",
    type=COUNT,
    default=6400,
    show_default=True,
    help="In the controller at any time.",
)
@click.option(
    "--events", type=WholeNumber(100), default=60_000, show_default=True, help="Measured, per preset."
)
@click.option(
    "--actions",
    default="fcfs-minimum,elastic,elastic:order=tail",
    show_default=True,
    help="Strategies of actions, name:option=value:…, comma-separated; empty: none.",
)
@click.option("--waiting", type=COUNT, default=1000, show_default=True, help="Actions that wait.")
@shared_options
def decisions(
    presets: str,
    engines: str,
    trajectories: int,
    events: int,
    actions: str,
    waiting: int,
    as_json: bool,
    seed: int,
) -> None:
    """CPU microseconds that the controller takes for each kind of event, in a steady state."""
    numbers = whole_numbers("--engines", engines, "16,64")
    names = [name.strip() for name in presets.split(",")]
    from benchmarks.decisions import as_json as decisions_json
    from benchmarks.decisions import bench_strategies, measure_decisions

    for name in names:
        bench_strategies(name, seed)  # refuses a bad preset before anything is measured
    click.echo(
        "preset         engines  trajectories  event                  count    mean us     p50 us     p99 us",
        err=as_json,
    )
    rows = []
    for row in measure_decisions(names, numbers, trajectories=trajectories, events=events, seed=seed):
        rows.append(row)
        click.echo(
            f"{row.preset:13}  {row.engines:7d}  {row.trajectories:12d}  {row.event:20}  {row.count:6d}  "
            f"{row.mean_us:9.1f}  {row.p50_us:9.1f}  {row.p99_us:9.1f}",
            err=as_json,
        )
    chosen = [name.strip() for name in actions.split(",") if name.strip()]
    action_rows = _action_rows(chosen, waiting, events, as_json, seed)
    if as_json:
        print_measured({**decisions_json(rows), "actions": action_rows})


def _action_rows(
    strategies: list[str], waiting: int, events: int, as_json: bool, seed: int
) -> list[dict[str, Any]]:
    """A row per strategy and figure; one event in 20 starts an action, and a pass is made for each 600."""
    from benchmarks.action_decisions import measure_action_decisions

    if strategies:
        click.echo(
            "actions               what                   waiting  cpus  started    mean us     p50 us     p99 us",
            err=as_json,
        )
    rows = []
    for row in measure_action_decisions(
        strategies, waiting=waiting, actions=max(20, events // 20), passes=max(5, events // 600), seed=seed
    ):
        rows.append(asdict(row))
        click.echo(
            f"{row.strategy:20}  {row.what:21}  {row.waiting:7d}  {row.cpus:4d}  {row.started:7.1f}  "
            f"{row.mean_us:9.1f}  {row.p50_us:9.1f}  {row.p99_us:9.1f}",
            err=as_json,
        )
    return rows
