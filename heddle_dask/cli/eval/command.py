"""``heddle eval``: its options. What it has in common with ``heddle rollout`` is that command's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from heddle_dask.cli.field_options import Asked, ConfiguredCommand
from heddle_dask.cli.rollout.command import one_cluster, rollout
from heddle_dask.cli.shared_options import COUNT, F, FiniteNumber, print_json, shared_options
from heddle_dask.core.errors import BadInput

NOT_OF_ROLLOUT = frozenset(
    ("env", "agent", "tasks", "samples", "model", "out", "append", "overwrite", "resume", "as_json", "seed", "config")
)
"""Options of ``heddle rollout`` that an evaluation does not have, or has with another meaning."""


def _rollout_options(function: F) -> F:
    """Add the options of ``heddle rollout`` that say how and where trajectories are rolled out."""
    options = [option for option in rollout.params if option.name not in NOT_OF_ROLLOUT]
    # Click collects the options of decorators from the innermost out.
    function.__click_params__ = [*reversed(options), *getattr(function, "__click_params__", [])]  # type: ignore[attr-defined]
    return function


@click.command("eval", cls=ConfiguredCommand)
@click.option("--env", "envs", multiple=True, help="Environment, as of heddle rollout; several times: several.")
@click.option(
    "--agent",
    "agents",
    multiple=True,
    help="Agent that runs as it is, NAME or FILE.toml, on --tasks; several times: several (docs/agents.md).",
)
@click.option(
    "--tasks",
    "task_sets",
    multiple=True,
    metavar="DIR|NAME|N",
    help="With --agent a set of tasks (docs/tasks.md), several times: several. A number: so many tasks of each "
    "[default: all of a set, 16 of an environment].",
)
@click.option("--model", "models", multiple=True, help="Model directory, several times: several [default: tiny-agent].")
@click.option("--samples", type=COUNT, default=1, show_default=True, help="Attempts of each arm at each task.")
@click.option(
    "--passed-from",
    type=FiniteNumber(),
    default=1.0,
    show_default=True,
    help="Least reward of an attempt that has passed.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="Directory of the evaluation; one that is there goes on: more samples, tasks, arms.",
)
@_rollout_options
@shared_options
@click.pass_context
def evaluate(ctx: click.Context, /, as_json: bool, **options: Any) -> None:
    """Evaluate agents or models on tasks, side by side on one cluster.

    The same command goes on with an evaluation that was interrupted, and makes again what the infrastructure has
    ended. OUT/index.html compares the arms task by task.
    """
    one_cluster(ctx, options)
    if not options["envs"] and not options["agents"]:
        raise BadInput("give --env NAME, or --agent NAME with --tasks DIR: what is to be evaluated")
    from heddle_dask.cli.eval.order import ArmsOrder
    from heddle_dask.cli.eval.run import run_evaluation

    outcome = run_evaluation(ArmsOrder.of(Asked.of(ctx, options)), to_stderr=as_json)
    if as_json:
        print_json(outcome.result)
    ctx.exit(outcome.exit_code)
