"""``python -m benchmarks overhead``: what the control plane adds to a step and to a tool call."""

from __future__ import annotations

import click
import uvloop

from heddle_dask.cli.shared_options import COUNT, print_measured, shared_options, whole_numbers


@click.command("overhead")
@click.option(
    "--trajectories", default="50,200,400", show_default=True, help="Counts to measure, comma-separated."
)
@click.option("--model", default=None, help="Directory with a tokenizer [default: the shipped tiny-agent].")
@click.option("--repeats", default=1, show_default=True, type=COUNT, help="Runs; medians are shown.")
@shared_options
def overhead(trajectories: str, model: str | None, repeats: int, as_json: bool, seed: int) -> None:
    """Latency added to each LLM step and tool call, and the ceiling in steps per second."""
    counts = whole_numbers("--trajectories", trajectories, "50,200,400")
    from benchmarks.overhead import as_json as overhead_json
    from benchmarks.overhead import measure_overhead
    from heddle_dask.cli.engine_option import chosen_model
    from heddle_dask.engines.collector import collect_seldom

    collect_seldom()
    rows = uvloop.run(
        measure_overhead(
            chosen_model(model, "emulated"),
            counts,
            repeats=repeats,
            seed=seed,
            on_progress=lambda message: click.echo(message, err=True),
        )
    )
    click.echo(
        "trajectories  step added p50 (range) / p99 ms  action p50/p99 ms  bare Dask  steps/s", err=as_json
    )
    for row in rows:
        least, most = row.added_ms_p50_range
        click.echo(
            f"{row.trajectories:12d}  {row.added_ms_p50:6.1f} ({least:.1f}-{most:.1f}) / {row.added_ms_p99:6.1f}  "
            f"{row.action_added_ms_p50:9.1f} / {row.action_added_ms_p99:6.1f}  {row.dask_ms_p50:9.1f}  "
            f"{row.steps_per_s:7.0f}",
            err=as_json,
        )
    if as_json:
        print_measured(overhead_json(rows))
