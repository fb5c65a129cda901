"""``python -m benchmarks passes``: what predictions are worth on the first and on later passes over the prompts."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.tables import print_measured
from heddle_dask.cli.shared_options import COUNT, NOT_NEGATIVE, POSITIVE, shared_options
from heddle_dask.core.errors import BadInput

if TYPE_CHECKING:
    from benchmarks.pass_makespans import PassPlace, PassWorkload
    from benchmarks.predictor_passes import PassReport
    from benchmarks.row_file import Row
    from benchmarks.runner import Runner


@click.command("passes")
@click.option(
    "--trace",
    "traces",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Recorded trace with repeated attempts, NAME or FILE: accuracy on a later pass; repeatable.",
)
@click.option(
    "--makespan",
    "workloads",
    multiple=True,
    help="Workload or trace: makespan of a simulated pass; repeatable.",
)
@click.option(
    "--strategies",
    default="heddle",
    show_default=True,
    help="Of the makespans, by commas, in the form of heddle simulate, without a predictor.",
)
@click.option(
    "--predictors",
    default="all",
    show_default=True,
    help="Of each strategy, by commas: none, cold, first-pass, later-pass, moved-on, exact.",
)
@click.option("--cluster", default="hopper64", show_default=True, help="Cluster of the makespans, NAME or FILE.")
@click.option("--tp", type=COUNT, default=None, help="TP degree of all engines [default: the cluster's].")
@click.option("--model", default="qwen3-14b", show_default=True, help="Published model of the makespans.")
@click.option(
    "--trajectories",
    type=COUNT,
    default=800,
    show_default=True,
    help="Of a synthetic pass; a trace has its own.",
)
@click.option("--samples", type=COUNT, default=8, show_default=True, help="Of these at each prompt.")
@click.option("--token-scale", type=POSITIVE, default=1.0, show_default=True, help="Factor on all token counts.")
@click.option("--tool-scale", type=NOT_NEGATIVE, default=1.0, show_default=True, help="Factor on all tool seconds.")
@click.option("--max-context-tokens", type=COUNT, default=40_960, show_default=True, help="Context of the engines.")
@click.option("--seeds", type=COUNT, default=1, show_default=True, help="Rollouts of each arm, from --seed on.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="JSON lines of the makespans; a run is added when it ends, and skipped if the file has it.",
)
@shared_options
def passes(
    traces: tuple[Path, ...],
    workloads: tuple[str, ...],
    strategies: str,
    predictors: str,
    cluster: str,
    tp: int | None,
    model: str,
    trajectories: int,
    samples: int,
    token_scale: float,
    tool_scale: float,
    max_context_tokens: int,
    seeds: int,
    out: Path | None,
    as_json: bool,
    seed: int,
) -> None:
    """Accuracy and makespan of a pass over prompts: without a predictor, before they are known, and after."""
    if not traces and not workloads:
        raise BadInput("nothing to measure: give --trace or --makespan")
    from benchmarks.code_digest import DECIDING, code_digest
    from benchmarks.runner import runner_of

    runner = runner_of(out, code_digest(DECIDING))
    rows: list[Row] = []
    if workloads:
        from benchmarks.pass_makespans import PassWorkload, makespan_tables

        shape = trajectories, samples, max_context_tokens, token_scale, tool_scale
        drawn = [PassWorkload(name, *shape) for name in workloads]
        place = _place(cluster, tp, model)
        rows = _makespans(drawn, place, range(seed, seed + seeds), strategies, predictors, runner)
    files: list[dict[str, object]] = []
    for trace in traces:
        # XGBoost takes a second to import.
        from benchmarks.predictor_passes import measure_passes

        report = measure_passes(trace, seed=seed, on_progress=_say)
        files.append(asdict(report))
        for line in accuracy_table(report):
            click.echo(line, err=as_json)
    if rows:
        for line in makespan_tables(rows):
            click.echo(line, err=as_json)
    if as_json:
        print_measured({"seed": seed, "files": files, "cluster": cluster, "model": model, "rows": rows})


def _say(message: str) -> None:
    click.echo(message, err=True)


def _place(cluster: str, tp: int | None, model: str) -> PassPlace:
    from benchmarks.pass_makespans import PassPlace
    from heddle_dask.sim.clusters import cluster_of

    found = cluster_of(cluster)
    return PassPlace(cluster, found if tp is None else replace(found, tp=tp), model)


def _makespans(
    workloads: list[PassWorkload],
    place: PassPlace,
    seeds: range,
    strategies: str,
    predictors: str,
    runner: Runner,
) -> list[Row]:
    from benchmarks.pass_makespans import measure_makespans, predictors_named
    from heddle_dask.sim.sweep import parse_arms

    arms, names = parse_arms(strategies), predictors_named(predictors)
    if stated := next((arm for arm in arms if any("predictor=" in text for text in arm.overrides)), None):
        raise BadInput(f"--strategies {stated.name}: name predictors with --predictors")
    if warning := runner.rows.other_code(runner.code):
        _say(warning)
    return [row for workload in workloads for row in measure_makespans(workload, place, seeds, arms, names, runner)]


def accuracy_table(report: PassReport) -> list[str]:
    """The lines of one trace's table."""
    lines = [
        f"{report.trace}: {report.prompts} prompts, {report.earlier} earlier and {report.later} later attempts",
        "steps  history           trajectories  recall  pearson  within  error  q90 covers  context  (by ratio of all)",
    ]
    for row in report.rows:
        of = {name: math.nan if value is None else value for name, value in row.items()}
        lines.append(
            f"{of['steps_finished']:5d}  {of['history']:16s}  {of['trajectories']:12d}  {of['recall']:6.2f}  "
            f"{of['pearson']:7.2f}  {of['within']:6.2f}  {of['error']:5.2f}  {of['coverage']:10.2f}  "
            f"{of['context']:7.3f}  {of['context_by_all']:17.3f}"
        )
    return lines
