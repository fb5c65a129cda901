"""``heddle train``: its options. What it has in common with ``heddle rollout`` is that command's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from heddle_dask.cli.field_options import Asked, ConfiguredCommand
from heddle_dask.cli.rollout.command import one_cluster, rollout
from heddle_dask.cli.shared_options import COUNT, NOT_NEGATIVE, POSITIVE, F, WholeNumber, print_json, shared_options
from heddle_dask.core.errors import BadInput

_OWN = (
    "agent",
    "env",
    "samples",
    "out",
    "append",
    "overwrite",
    "resume",
    "tasks",
    "run_timeout",
    "logprobs",
)
_OF_TRACES = ("token_scale", "tool_scale")
_SHARED = ("as_json", "seed", "config")
NOT_OF_ROLLOUT = frozenset((*_OWN, *_OF_TRACES, *_SHARED))
"""Options of ``heddle rollout`` that a training does not have, or has with another meaning."""


def _rollout_options(function: F) -> F:
    """Add the options of ``heddle rollout`` that say how and where trajectories are rolled out."""
    options = [option for option in rollout.params if option.name not in NOT_OF_ROLLOUT]
    # Click collects the options of decorators from the innermost out.
    function.__click_params__ = [*reversed(options), *getattr(function, "__click_params__", [])]  # type: ignore[attr-defined]
    return function


@click.command("train", cls=ConfiguredCommand)
@click.option(
    "--env",
    default="math",
    show_default=True,
    help="NAME[:TIER] or package.module:function; several with weights: math=2,code:hard=1.",
)
@click.option("--steps", type=COUNT, default=50, show_default=True, help="Training steps in all.")
@click.option("--groups", type=COUNT, default=8, show_default=True, help="Tasks in a batch.")
@click.option("--samples", type=COUNT, default=8, show_default=True, help="Attempts per task: a group.")
@click.option(
    "--batch",
    type=COUNT,
    default=None,
    help="Trajectories in a batch, in place of --groups: a multiple of --samples.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory of the training.")
@click.option("--resume", is_flag=True, help="Go on with the training at --out, given the same options.")
@click.option("--overwrite", is_flag=True, help="Replace the training at --out.")
@click.option(
    "--mode",
    type=click.Choice(["sync", "one-off", "async"]),
    default="async",
    show_default=True,
    help="How rollout and training overlap (docs/training.md).",
)
@click.option("--alpha", type=int, default=None, help="Largest age of a sample in steps [default: 2 in async].")
@click.option("--depth", type=WholeNumber(0), default=None, help="Batches rolled out ahead [default: alpha].")
@click.option(
    "--switch",
    type=click.Choice(["after-batch", "before-batch"]),
    default=None,
    help="When engines take new weights: after the next batch is there, or at once [default: at once, but in one-off].",
)
@click.option(
    "--staleness",
    type=click.Choice(["cancel", "pace"]),
    default="cancel",
    show_default=True,
    help="What becomes too old is cancelled, or kept from becoming so (docs/staleness.md).",
)
@click.option("--extra-groups", type=WholeNumber(0), default=0, help="Groups that run beyond a batch.")
@click.option("--extra-samples", type=WholeNumber(0), default=0, help="Attempts that run beyond a group.")
@click.option(
    "--late",
    type=click.Choice(["cancel", "keep"]),
    default="cancel",
    show_default=True,
    help="What becomes of the last of these (docs/groups.md).",
)
@click.option(
    "--prefix-sampling",
    is_flag=True,
    help="Ask skewed tasks again behind the beginning of an earlier attempt (docs/groups.md).",
)
@click.option(
    "--truncated",
    type=click.Choice(["count", "mask", "drop"]),
    default="count",
    show_default=True,
    help="Attempts that end at a limit: as others, reward only, or left out (docs/groups.md).",
)
@click.option(
    "--max-repeats",
    type=WholeNumber(0),
    default=3,
    show_default=True,
    help="How often a task is asked for again whose group became too old.",
)
@click.option("--lr", type=POSITIVE, default=1e-5, show_default=True, help="Learning rate.")
@click.option("--lora", type=COUNT, default=None, help="Rank: train an adapter [default: all weights].")
@click.option(
    "--trainer",
    "trainer_set",
    multiple=True,
    help="KEY=VALUE: another option of the trainer, such as passes=2 (docs/trainer.md).",
)
@click.option("--trainer-ranks", type=COUNT, default=1, show_default=True, help="Processes of the trainer.")
@click.option(
    "--store",
    default=None,
    help="Weight store: directory, URL, or collective://HOST:PORT to broadcast [default: OUT/weights].",
)
@click.option(
    "--mismatch",
    type=click.Choice(["end", "tell"]),
    default="end",
    show_default=True,
    help="What follows where logprobs of engines and trainer differ by more than 1 nat per fresh token.",
)
@click.option("--keep-kv", is_flag=True, help="Steps in flight keep the KV of older weights.")
@click.option(
    "--update-order",
    type=click.Choice(["one-by-one", "all-at-once"]),
    default="one-by-one",
    show_default=True,
    help="Engines take new weights in turns, or each as soon as it can.",
)
@click.option("--eval-tasks", type=WholeNumber(0), default=0, help="Held-out tasks of each evaluation.")
@click.option("--eval-every", type=COUNT, default=None, help="Steps between two [default: first and last].")
@click.option("--eval-samples", type=COUNT, default=1, show_default=True, help="Attempts per held-out task.")
@click.option("--eval-temperature", type=NOT_NEGATIVE, default=0.0, show_default=True, help="Of held-out attempts.")
@click.option("--report-to", multiple=True, help="tensorboard, wandb or trackio; offline unless configured.")
@_rollout_options
@shared_options
@click.pass_context
def train(ctx: click.Context, /, as_json: bool, **options: Any) -> None:
    """Train a model on environments: rollout, training and weight updates side by side."""
    if options["resume"] and options["overwrite"]:
        raise BadInput("--resume and --overwrite exclude each other: use one")
    one_cluster(ctx, options)
    from heddle_dask.cli.train.order import TrainOrder
    from heddle_dask.cli.train.run import run_training

    order = TrainOrder.of(Asked.of(ctx, options))
    outcome = run_training(order, to_stderr=as_json)
    if as_json:
        print_json(outcome.result)
    ctx.exit(outcome.exit_code)
