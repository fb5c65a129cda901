"""``python -m benchmarks weights``: what a change of weights takes of an engine's time."""

from __future__ import annotations

import click

from heddle_dask.cli.engine_option import chosen_model, engine_option
from heddle_dask.cli.shared_options import COUNT, print_measured, shared_options, whole_numbers
from heddle_dask.engines.vllm_command import DTYPES


@click.command("weights")
@engine_option("vllm")
@click.option("--model", default=None, help="Model directory [default: the shipped agent].")
@click.option(
    "--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Type of the weights."
)
@click.option("--steps", default="1,8", show_default=True, help="Steps in flight, comma-separated.")
@click.option("--updates", type=COUNT, default=5, show_default=True, help="Changes of weights for each row.")
@shared_options
def weights(
    engine: str, model: str | None, dtype: str, steps: str, updates: int, as_json: bool, seed: int
) -> None:
    """Seconds to publish, fetch, pause and load weights while steps are in flight, on one engine of this machine."""
    counts = whole_numbers("--steps", steps, "1,8")
    from benchmarks.weights import as_json as weights_json
    from benchmarks.weights import measure_weights
    from heddle_dask.engines.spec import EngineSpec

    spec = EngineSpec(
        engine, chosen_model(model, engine), slots=max(counts), max_model_len=2048, dtype=dtype, seed=seed
    )
    click.echo(
        "steps  KV          MB  publish s  fetch s  paused ms (longest)  of it loading  lost steps",
        err=as_json,
    )
    rows = []
    for row in measure_weights(spec, counts, updates):
        rows.append(row)
        click.echo(
            f"{row.steps:5d}  {'kept' if row.keep_kv else 'dropped':7s}  {row.weight_bytes / 1e6:6.1f}  "
            f"{row.publish_s:9.3f}  {row.fetch_s:7.3f}  {1e3 * row.paused_s:9.0f} ({1e3 * row.longest_paused_s:.0f})"
            f"{'':7s}  {1e3 * row.load_s:13.0f}  {row.lost_steps:10d}",
            err=as_json,
        )
    if as_json:
        print_measured(weights_json(rows))
