"""Prints a training: its steps, its evaluations, what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from heddle_dask.core.value_types import read_from
from heddle_dask.training.json_lines import read_lines
from heddle_dask.training.run_directory import TrainingDirectory
from heddle_dask.training.training_result import reward_change, training_result
from heddle_dask.views.drawing.safe_console import SafeConsole

SHOWN_STEPS = 20
"""Rows of a long training that the table shows; they are spread evenly, and the last one is among them."""

_FILE_WIDTH = 100

_COLUMNS = (
    "step",
    "reward",
    "held out",
    "age",
    "entropy",
    "grad norm",
    "mismatch",
    "waste",
    "wait s",
    "train s",
)


def show_training(path: Path, *, to_stderr: bool) -> dict[str, Any]:
    directory = TrainingDirectory(path)
    stored = directory.description()
    metrics, evaluations = read_lines(directory.metrics), read_lines(directory.evaluations)
    asked = stored["asked"]
    with read_from(path):
        result = training_result(metrics, evaluations, str(path))
        steps, lines = _steps(metrics), _lines(result, evaluations, stored["lineages"], asked)
    console = SafeConsole(stderr=to_stderr, soft_wrap=True)
    if not console.is_terminal:
        console = SafeConsole(stderr=to_stderr, soft_wrap=True, width=_FILE_WIDTH)
    console.print(
        f"environment {asked.get('environment')}, model {asked.get('model')}, {asked.get('groups')} groups of "
        f"{asked.get('samples')}, seed {asked.get('seed')}",
        highlight=False,
        markup=False,
    )
    console.print(steps)
    for line in lines:
        console.print(line, highlight=False, markup=False)
    return {**result, "lineages": stored["lineages"], "asked": asked}


def _steps(metrics: Sequence[Mapping[str, Any]]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in _COLUMNS:
        shown.add_column(name, justify="right", no_wrap=True)
    for row in spread(metrics, SHOWN_STEPS):
        trainer = row["trainer"]
        shown.add_row(
            str(row["step"]),
            _number(row["reward"], 3),
            _number(row["held_out_reward"], 3),
            _number(_mean_age(row["staleness"]), 2),
            _number(trainer.get("entropy"), 3),
            _number(trainer.get("grad_norm"), 3),
            _number(trainer.get("logprob_difference_mean"), 5),
            f"{sum(row['wasted_tokens'].values()):,}",
            _number(row["seconds"]["wait"], 1),
            _number(row["seconds"]["train"], 1),
        )
    return shown


def spread(rows: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """At most `most` rows, evenly spread, with the first and the last."""
    if len(rows) <= most:
        return list(rows)
    last = len(rows) - 1
    return [rows[round(index * last / (most - 1))] for index in range(most)]


def _lines(
    result: Mapping[str, Any],
    evaluations: Sequence[Mapping[str, Any]],
    lineages: Sequence[Mapping[str, Any]],
    asked: Mapping[str, Any],
) -> list[str]:
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in result["seconds"].items())
    lines = [
        f"{result['steps']} of {asked.get('steps')} steps, {result['samples']} samples",
        f"seconds (phases overlap): {seconds}",
    ]
    if result["wasted_tokens"]:
        causes = ", ".join(f"{tokens:,} {cause}" for cause, tokens in result["wasted_tokens"].items())
        lines.append(f"tokens that no batch took: {causes}")
    for row in evaluations:
        if row["reward"] is not None:
            low, high = row["reward_ci"]
            lines.append(
                f"weights {row['number']}: held-out reward {row['reward']:.3f} [{low:.3f}, {high:.3f}], "
                f"{row['tasks']} tasks"
            )
    change = reward_change(evaluations)
    if change is not None:
        lines.append(
            f"change, paired by task: {change.mean:+.3f} [{change.low:+.3f}, {change.high:+.3f}] (95 %, bootstrap)"
        )
    for each in lineages[1:]:
        lines.append(f"went on from step {each['number']} as {each['lineage']}")
    return lines


def _mean_age(ages: Mapping[str, int]) -> float | None:
    total = sum(ages.values())
    return sum(int(age) * count for age, count in ages.items()) / total if total else None


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
