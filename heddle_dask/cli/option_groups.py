"""Options that several commands share: workload and engines, live and simulated."""

from __future__ import annotations

from collections.abc import Callable

import click

from heddle_dask.cli.shared_options import COUNT, NOT_NEGATIVE, POSITIVE, TOKENS, F, in_order

DEFAULT_CONTEXT_TOKENS = 40_960

SEEDS = click.option("--seeds", type=COUNT, default=3, show_default=True, help="How many, from --seed on.")
SAMPLES = click.option("--samples", type=COUNT, default=16, show_default=True, help="Trajectories a prompt.")
MAX_CONTEXT_TOKENS = click.option(
    "--max-context-tokens",
    type=TOKENS,
    default=DEFAULT_CONTEXT_TOKENS,
    show_default=True,
    help="Longest context of an engine.",
)


def simulated(function: F) -> F:
    """Workload, model and how they are simulated."""
    add: Callable[[F], F] = in_order(
        [
            click.option(
                "--workload",
                "--trace",
                "workload",
                required=True,
                help="coding, search, math, or a trace, NAME or FILE.",
            ),
            click.option(
                "--model",
                default="qwen3-14b",
                show_default=True,
                help="Name or directory with a config.json.",
            ),
            SEEDS,
            SAMPLES,
            click.option("--slots", type=COUNT, default=None, help="Of each engine [default: 100 for each GPU]."),
            MAX_CONTEXT_TOKENS,
            click.option(
                "--token-scale",
                type=POSITIVE,
                default=1.0,
                show_default=True,
                help="Factor on all token counts.",
            ),
            click.option(
                "--tool-scale",
                type=NOT_NEGATIVE,
                default=1.0,
                show_default=True,
                help="Factor on all tool seconds.",
            ),
            click.option(
                "--warm/--cold",
                default=True,
                show_default=True,
                help="Predictors learn from other groups first.",
            ),
            click.option(
                "--scheduler",
                default=None,
                help="Run on the workers of this Dask scheduler [default: here].",
            ),
            click.option(
                "--table",
                "tables",
                multiple=True,
                help="Measured table, name or FILE, in place of the cost formula; one for each degree.",
            ),
        ]
    )
    return add(function)
