"""``heddle bench passes``: what the history of prompts is worth on a later pass over them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from heddle_dask.cli.number_types import COUNT
from heddle_dask.cli.shared_options import print_measured, shared_options
from heddle_dask.core.errors import BadInput

if TYPE_CHECKING:
    from heddle_dask.benchmarks.predictor_passes import PassReport
    from heddle_dask.sim.rollout import SimulatedRollout


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
    help="Workload or trace: makespan of a simulated later pass; repeatable.",
)
@click.option(
    "--cluster", default="hopper64", show_default=True, help="Cluster of the makespans, NAME or FILE."
)
@click.option("--model", default="qwen3-14b", show_default=True, help="Published model of the makespans.")
@click.option(
    "--trajectories",
    type=COUNT,
    default=800,
    show_default=True,
    help="Of a synthetic later pass; a trace has its own.",
)
@click.option("--samples", type=COUNT, default=8, show_default=True, help="Of these at each prompt.")
@click.option("--token-scale", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True)
@click.option(
    "--max-context-tokens", type=COUNT, default=40_960, show_default=True, help="Context of the engines."
)
@click.option(
    "--seeds", type=COUNT, default=1, show_default=True, help="Rollouts of each arm, from --seed on."
)
@shared_options
def passes(
    traces: tuple[Path, ...],
    workloads: tuple[str, ...],
    cluster: str,
    model: str,
    trajectories: int,
    samples: int,
    token_scale: float,
    max_context_tokens: int,
    seeds: int,
    as_json: bool,
    seed: int,
) -> None:
    """Accuracy and makespan of a later pass: without the history of prompts, with it, with that of an older policy."""
    if not traces and not workloads:
        raise BadInput("nothing to measure: give --trace or --makespan")
    # XGBoost takes a second to import.
    from heddle_dask.benchmarks.predictor_makespans import PassWorkload, measure_makespans
    from heddle_dask.benchmarks.predictor_passes import as_json as passes_json
    from heddle_dask.benchmarks.predictor_passes import measure_passes
    from heddle_dask.sim.clusters import cluster_of

    def progress(message: str) -> None:
        click.echo(message, err=True)

    files: list[dict[str, object]] = []
    for trace in traces:
        report = measure_passes(trace, seed=seed, on_progress=progress)
        files.append(passes_json(report))
        for line in accuracy_table(report):
            click.echo(line, err=as_json)
    rows: list[dict[str, Any]] = []
    for name in workloads:
        workload = PassWorkload(name, trajectories, samples, max_context_tokens, token_scale)
        fleet = cluster_of(cluster).fleet(model, max_context_tokens=max_context_tokens)
        made = measure_makespans(workload, fleet, range(seed, seed + seeds), on_progress=progress)
        rows += [{"workload": name, **one.figures()} for one in made]
        for line in makespan_table(name, made):
            click.echo(line, err=as_json)
    if as_json:
        print_measured({"seed": seed, "files": files, "cluster": cluster, "model": model, "rows": rows})


def accuracy_table(report: PassReport) -> list[str]:
    """The lines of one trace's table."""
    lines = [
        f"{report.trace}: {report.prompts} prompts, {report.earlier} earlier and {report.later} later attempts",
        "steps  history           trajectories  recall  pearson  within  error  q90 covers  context  (by ratio of all)",
    ]
    for row in report.rows:
        score = row.score
        lines.append(
            f"{row.steps_finished:5d}  {row.history:16s}  {row.trajectories:12d}  {score.recall:6.2f}  "
            f"{score.pearson:7.2f}  {row.within:6.2f}  {score.error:5.2f}  {score.coverage:10.2f}  "
            f"{row.context:7.3f}  {row.context_by_all:17.3f}"
        )
    return lines


def makespan_table(name: str, made: list[SimulatedRollout]) -> list[str]:
    """The lines of one workload's table."""
    lines = [f"{name}: seed  predictor         makespan s  share of the bound"]
    lines += [
        f"{one.seed:10d}  {one.strategy:16s}  {one.makespan_s:10.1f}  {one.bound_share:.2f}" for one in made
    ]
    return lines
