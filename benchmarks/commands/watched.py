"""``python -m benchmarks watched``: what watching a rollout costs it."""

from __future__ import annotations

import click
import uvloop

from heddle_dask.cli.shared_options import COUNT, POSITIVE, print_measured, shared_options


@click.command("watched")
@click.option("--trajectories", default=200, show_default=True, type=COUNT, help="At once.")
@click.option("--rounds", default=5, show_default=True, type=COUNT, help="Of all arms; medians are shown.")
@click.option("--seconds", default=4.0, show_default=True, type=POSITIVE, help="Of one arm in a round.")
@click.option("--model", default=None, help="Directory with a tokenizer [default: the shipped tiny-agent].")
@shared_options
def watched(
    trajectories: int, rounds: int, seconds: float, model: str | None, as_json: bool, seed: int
) -> None:
    """Steps per second with the dashboard open, closed and not installed, and beside heddle top."""
    from benchmarks.watched import as_json as watched_json
    from benchmarks.watched import history_us_per_event, measure_watched
    from heddle_dask.cli.engine_option import chosen_model
    from heddle_dask.engines.collector import collect_seldom

    collect_seldom()
    rows = uvloop.run(
        measure_watched(
            chosen_model(model, "emulated"),
            trajectories=trajectories,
            rounds=rounds,
            seconds=seconds,
            seed=seed,
            on_progress=lambda message: click.echo(message, err=True),
        )
    )
    history_us = history_us_per_event(seed=seed)
    click.echo(
        "arm            steps/s   ratio (range)        scheduler us/step (ratio)  messages/s", err=as_json
    )
    for row in rows:
        least, most = row.ratio_range
        click.echo(
            f"{row.arm:13s}  {row.steps_per_s:7.0f}  {row.ratio:.3f} ({least:.3f}-{most:.3f})  "
            f"{row.scheduler_us_per_step:17.1f} ({row.scheduler_ratio:.3f})  {row.messages_per_s:10.1f}",
            err=as_json,
        )
    click.echo(f"history: {history_us} us per event", err=as_json)
    if as_json:
        print_measured(watched_json(rows, history_us))
