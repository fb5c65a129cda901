"""Options of studies that replay traces on engines of this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from heddle_dask.cli.engine_option import engine_option
from heddle_dask.cli.shared_options import COUNT, NOT_NEGATIVE, POSITIVE, TOKENS, F, in_order


def measured_live(*, token_scale: float, engine: str) -> Callable[[F], F]:
    """Traces to replay, and the engines of this machine that replay them.

    Parameters
    ----------
    token_scale, engine
        Defaults of ``--token-scale`` and ``--engine``.
    """
    return in_order(
        [
            click.option(
                "--trace",
                multiple=True,
                required=True,
                type=Path,
                help="Recorded trace, NAME or FILE; repeatable.",
            ),
            click.option("--tasks", type=COUNT, default=64, show_default=True, help="Trajectories."),
            click.option(
                "--token-scale",
                type=POSITIVE,
                default=token_scale,
                show_default=True,
                help="Factor on all token counts.",
            ),
            click.option(
                "--tool-scale",
                type=NOT_NEGATIVE,
                default=0.02,
                show_default=True,
                help="Factor on all tool seconds.",
            ),
            engine_option(engine),
            click.option("--engines", type=COUNT, default=2, show_default=True, help="How many."),
            click.option("--slots", type=COUNT, default=6, show_default=True, help="Of each engine."),
            click.option("--profile", default="tiny-cpu", show_default=True, help="Cost profile of the engines."),
            click.option("--time-scale", type=POSITIVE, default=1.0, show_default=True, help="Of emulated engines."),
            click.option(
                "--max-context",
                type=TOKENS,
                default=4096,
                show_default=True,
                help="Longest context; recorded trajectories end where it is full.",
            ),
            click.option("--model", default=None, help="Model directory [default: the shipped tiny-agent]."),
        ]
    )
