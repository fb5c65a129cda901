"""``python -m benchmarks samples``: CPU seconds of the path of one sample."""

from __future__ import annotations

from dataclasses import asdict

import click

from heddle_dask.cli.shared_options import COUNT, print_measured, shared_options


@click.command("samples")
@click.option("--engines", type=COUNT, multiple=True, default=(1, 64, 1024), show_default=True)
@click.option("--batch", type=COUNT, default=512, show_default=True, help="Samples of a training step.")
@click.option("--steps", type=COUNT, default=5, show_default=True, help="LLM steps of a sample.")
@click.option("--step-tokens", type=COUNT, default=400, show_default=True, help="Tokens of a step.")
@click.option("--strategy", default="heddle", show_default=True, help="Preset of the scheduler.")
@shared_options
def samples(
    engines: tuple[int, ...],
    batch: int,
    steps: int,
    step_tokens: int,
    strategy: str,
    as_json: bool,
    seed: int,
) -> None:
    """CPU milliseconds of a sample by part, and the share of a training step of 60 s."""
    from benchmarks.samples import measure_samples

    rows = []
    for row in measure_samples(
        engines, batch=batch, steps=steps, step_tokens=step_tokens, preset=strategy, seed=seed
    ):
        rows.append(row)
        if not as_json:
            parts = {
                "groups": row.groups_s,
                "store": row.store_s,
                "training": row.training_s,
                "scheduler": row.scheduler_s,
                "total": row.total_s,
            }
            told = ", ".join(f"{name} {1e3 * part:.2f}" for name, part in parts.items())
            click.echo(f"{row.engines} engines: ms per sample: {told}; {row.share_of_step:.2%} of a step")
    if as_json:
        print_measured({"rows": [asdict(row) for row in rows]})
