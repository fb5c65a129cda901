"""``heddle bench kv-transfer``: what it costs to move a context's KV cache to another engine."""

from __future__ import annotations

import click
import uvloop

from heddle_dask.cli.engine_option import engine_option
from heddle_dask.cli.shared_options import print_measured, shared_options
from heddle_dask.cli.whole_numbers import whole_numbers


@click.command("kv-transfer")
@engine_option("vllm")
@click.option("--contexts", default="128,512,1024,2048,3072", show_default=True, help="Lengths in tokens.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Per length.")
@click.option("--model", default=None, help="Model directory [default: the shipped tiny-agent].")
@shared_options
def kv_transfer(
    engine: str, contexts: str, repeats: int, model: str | None, as_json: bool, seed: int
) -> None:
    """Export, import and recomputation of a context on two engines of this machine."""
    lengths = whole_numbers("--contexts", contexts, "128,1024")
    from heddle_dask.benchmarks.kv_transfer import as_json as rows_json
    from heddle_dask.benchmarks.kv_transfer import engine_spec, measure_kv_transfer
    from heddle_dask.cli.model_choice import chosen_model, context_limit

    chosen = chosen_model(model, engine)
    rows = uvloop.run(
        measure_kv_transfer(
            engine_spec(engine, chosen, context_limit(chosen, None)),
            lengths,
            repeats=repeats,
            seed=seed,
            on_progress=lambda message: click.echo(message, err=True),
        )
    )
    click.echo("context  export ms (range)  import ms (range)  recompute ms (range)  failed", err=as_json)
    for row in rows:
        times = "  ".join(
            f"{median:8.1f} ({least:.1f}-{most:.1f})"
            for median, (least, most) in (
                (row.export_ms, row.export_ms_range),
                (row.import_ms, row.import_ms_range),
                (row.recompute_ms, row.recompute_ms_range),
            )
        )
        click.echo(f"{row.context_tokens:7d}  {times}  {row.failed:6d}", err=as_json)
    if as_json:
        print_measured(rows_json(rows))
