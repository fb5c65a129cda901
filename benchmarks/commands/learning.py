"""``python -m benchmarks learning``: held-out reward over tokens and seconds, and what a score of it costs."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.row_file import ROWS_OUT, Row, RowFile
from heddle_dask.cli.option_groups import SEEDS
from heddle_dask.cli.shared_options import COUNT, POSITIVE, shared_options
from heddle_dask.core.errors import BadInput

SCORES = {"math": 0.88, "search": 0.85}
"""Held-out rewards to be reached, set before anything was measured: the agent starts at about 0.8 and 0.75."""


@click.command("learning")
@click.option(
    "--env",
    "envs",
    multiple=True,
    default=tuple(f"{name}={score}" for name, score in SCORES.items()),
    show_default=True,
    help="NAME=SCORE: an environment, and the held-out reward that is to be reached; repeatable.",
)
@SEEDS
@click.option("--steps", type=COUNT, default=10, show_default=True, help="Training steps.")
@click.option("--groups", type=COUNT, default=8, show_default=True, help="Tasks in a batch.")
@click.option("--samples", type=COUNT, default=8, show_default=True, help="Attempts per task.")
@click.option("--lr", type=POSITIVE, default=5e-4, show_default=True, help="Learning rate.")
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
    from benchmarks.learning.trainings import ARMS, StudyRun, train
    from benchmarks.tables import print_measured

    scores = dict(map(_score, envs))
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
        for env in scores
        for arm in ARMS
        if not arms or arm in arms
    ]
    for run in runs:
        for row in train(run, rows, code_digest()):
            click.echo(_told(row), err=True)
    mine = [row for row in rows.rows("evaluation") if row["conditions"] == " ".join(options)]
    made = [line for env, score in scores.items() for line in _costs(env, score, mine)]
    if as_json:
        print_measured({"rows": made})
    for line in _table(made):
        click.echo(line, err=as_json)


def _score(text: str) -> tuple[str, float]:
    name, _, given = text.partition("=")
    try:
        return name, float(given)
    except ValueError:
        raise BadInput(f"--env {text}: use NAME=SCORE, such as math=0.88") from None


def _told(row: Row) -> str:
    where = f"{row['env']} seed {row['seed']} {row['arm']}"
    if row["kind"] == "evaluation":
        return f"{where}: weights {row['number']}: {row['reward']:.3f} after {row['tokens']} tokens, {row['seconds']} s"
    return (
        f"{where}: {row['steps']} steps, {row['behind_prefix']} of {row['trajectories']} trajectories behind a prefix"
    )


def _costs(env: str, score: float, rows: list[Row]) -> list[Row]:
    """For each seed and arm: what the first weights that reached the score took, and the reward of the last."""
    from benchmarks.learning.trainings import cost_to_score

    made: list[Row] = []
    for key in sorted({(row["seed"], row["arm"]) for row in rows if row["env"] == env}):
        mine = [row for row in rows if row["env"] == env and (row["seed"], row["arm"]) == key]
        reached, last = cost_to_score(mine, score), max(mine, key=lambda row: int(row["number"]))
        facts = {name: None if reached is None else reached[name] for name in ("number", "tokens", "seconds")}
        ends = {"first_reward": min(mine, key=lambda row: int(row["number"]))["reward"], "last_reward": last["reward"]}
        made.append({"env": env, "score": score, "seed": key[0], "arm": key[1], **facts, **ends})
    return made


def _table(rows: list[Row]) -> list[str]:
    from benchmarks.tables import markdown

    heads = ("env", "seed", "arm", "score", "reached by weights", "tokens", "seconds", "first reward", "last reward")
    names = ("env", "seed", "arm", "score", "number", "tokens", "seconds", "first_reward", "last_reward")
    return list(markdown(heads, [["-" if row[name] is None else str(row[name]) for name in names] for row in rows]))
