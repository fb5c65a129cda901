"""``python -m benchmarks actions``: tool and reward calls on shared pools, against static ones."""

from __future__ import annotations

from pathlib import Path

import click

from heddle_dask.cli.option_groups import SEEDS
from heddle_dask.cli.shared_options import shared_options


@click.command("actions")
@click.option(
    "--experiment",
    default="simulated",
    show_default=True,
    help="Names by commas; `simulated`: all in virtual time; `list` prints the names.",
)
@SEEDS
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="JSON lines of simulated rollouts: known ones are not run again.",
)
@click.option(
    "--scheduler",
    default=None,
    help="Run them on the workers of this Dask scheduler, which need a checkout [default: here].",
)
@click.option(
    "--model",
    default=None,
    help="Directory with a tokenizer, for the live ones [default: the shipped tiny-agent].",
)
@shared_options
def actions(
    experiment: str,
    seeds: int,
    out: Path | None,
    scheduler: str | None,
    model: str | None,
    as_json: bool,
    seed: int,
) -> None:
    """ARL-Tangram's experiments with CPUs, GPUs and APIs, and what an action costs on a real cluster."""
    from benchmarks.actions.experiments import EXPERIMENTS
    from heddle_dask.cli.engine_option import chosen_model

    EXPERIMENTS.run(
        experiment,
        range(seed, seed + seeds),
        out,
        as_json=as_json,
        scheduler=scheduler,
        model=lambda: chosen_model(model, "emulated"),
    )
