"""``python -m benchmarks learning``: held-out reward over tokens and seconds, and what a score of it costs."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.row_file import ROWS_OUT, Row, RowFile
from heddle_dask.cli.option_groups import SEEDS
from heddle_dask.cli.shared_options import COUNT, POSITIVE, shared_options
from heddle_dask.core.errors import BadInput

ENVIRONMENTS = ("math", "search")


@click.command("learning")
@click.option(
    "--env",
    "envs",
    multiple=True,
    default=ENVIRONMENTS,
    show_default=True,
    help="An environment; repeatable.",
)
@click.option(
    "--gain",
    type=float,
    default=0.1,
    show_default=True,
    help="Of held-out reward, over that of the first weights: the score whose cost is told.",
)
@SEEDS
@click.option("--steps", type=COUNT, default=20, show_default=True, help="Training steps.")
@click.option("--groups", type=COUNT, default=8, show_default=True, help="Tasks in a batch.")
@click.option("--samples", type=COUNT, default=8, show_default=True, help="Attempts per task.")
@click.option("--lr", type=POSITIVE, default=2e-4, show_default=True, help="Learning rate.")
@click.option("--temperature", type=POSITIVE, default=1.5, show_default=True, help="Of sampling, held out as well.")
@click.option("--slots", type=COUNT, default=64, show_default=True, help="Of the engine.")
@click.option("--max-context-tokens", type=COUNT, default=1024, show_default=True, help="Of a trajectory.")
@click.option("--eval-tasks", type=COUNT, default=100, show_default=True, help="Held-out tasks of an evaluation.")
@click.option("--eval-every", type=COUNT, default=5, show_default=True, help="Steps between two evaluations.")
@click.option("--arm", "arms", multiple=True, help="sync, async or prefix; repeatable [default: all].")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Of the trainings: those that have begun are resumed.",
)
@ROWS_OUT
@shared_options
def learning(
    envs: tuple[str, ...],
    gain: float,
    seeds: int,
    steps: int,
    groups: int,
    samples: int,
    lr: float,
    temperature: float,
    slots: int,
    max_context_tokens: int,
    eval_tasks: int,
    eval_every: int,
    arms: tuple[str, ...],
    folder: Path,
    out: Path | None,
    as_json: bool,
    seed: int,
) -> None:
    """Train the shipped agent on real vLLM: sync, async, with prefix sampling; arms take turns on each seed."""
    from benchmarks.code_digest import code_digest
    from benchmarks.learning.gains import COLUMNS, arm_gains
    from benchmarks.learning.trainings import ARMS, StudyRun, train
    from benchmarks.tables import print_measured_rows

    if unknown := {*arms} - {*ARMS}:
        raise BadInput(f"--arm {min(unknown)}: use {', '.join(ARMS)}")
    rows = RowFile(out)
    rows.check_writable()
    options = (
        *("--steps", str(steps), "--groups", str(groups), "--samples", str(samples), "--lr", f"{lr:g}"),
        *("--slots", str(slots), "--max-context-tokens", str(max_context_tokens)),
        *("--temperature", f"{temperature:g}", "--eval-temperature", f"{temperature:g}"),
        *("--eval-tasks", str(eval_tasks), "--eval-every", str(eval_every)),
    )
    runs = [
        StudyRun(env, each, arm, options, folder)
        for each in range(seed, seed + seeds)
        for env in envs
        for arm in ARMS
        if not arms or arm in arms
    ]
    for run in runs:
        for row in train(run, rows, code_digest()):
            click.echo(_told(row), err=True)
    mine = [row for row in rows.rows("evaluation") if row["conditions"] == " ".join(options) and row["env"] in envs]
    print_measured_rows(arm_gains(mine, gain), COLUMNS, as_json=as_json)


def _told(row: Row) -> str:
    where = f"{row['env']} seed {row['seed']} {row['arm']}"
    if row["kind"] == "evaluation":
        return f"{where}: weights {row['number']}: {row['reward']:.3f} after {row['tokens']} tokens, {row['seconds']} s"
    behind = f"{row['behind_prefix']} of {row['trajectories']} trajectories behind a prefix"
    return "; ".join([f"{where}: {row['steps']} steps, {behind}", *filter(None, [row.get("ended")])])
