"""``python -m benchmarks slurm``: what a batch system adds to a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.code_digest import code_digest
from benchmarks.row_file import ROWS_OUT
from benchmarks.runner import Runner, runner_of
from benchmarks.tables import print_measured
from heddle_dask.cli.shared_options import COUNT, shared_options

if TYPE_CHECKING:
    from benchmarks.slurm import SlurmJob


@click.command("slurm")
@click.option("--cluster", required=True, type=click.Path(path_type=Path), help="Cluster file with SLURM groups.")
@click.option("--model", default=None, help="Directory with a tokenizer [default: the shipped tiny-agent].")
@click.option("--repeats", default=3, show_default=True, type=COUNT, help="Starts, and losses of a job.")
@click.option("--late-jobs", is_flag=True, help="In place of that: a rollout whose four jobs are submitted over time.")
@ROWS_OUT
@shared_options
def slurm(
    cluster: Path,
    model: str | None,
    repeats: int,
    late_jobs: bool,
    out: Path | None,
    as_json: bool,
    seed: int,
) -> None:
    """Seconds from an accepted job to its first LLM step, by phase; and what the loss of a job costs."""
    from benchmarks.slurm import SlurmJob, Start, in_its_folder, measure_loss, measure_start, summary
    from benchmarks.slurm_loss import LostJob
    from heddle_dask.cli.engine_option import chosen_model
    from heddle_dask.live.clusters.slurm.cluster_file import read_cluster_file

    read_cluster_file(cluster)
    chosen_model(model, "emulated")
    runner = runner_of(out, code_digest())
    if late_jobs:
        _late_jobs(runner, [SlurmJob(str(cluster), cluster.read_text(), model, n) for n in range(repeats)], as_json)
        return
    starts: list[Start] = []
    losses: list[LostJob] = []
    for number in range(repeats):
        jobs = [SlurmJob(str(cluster), cluster.read_text(), model, number)]
        starts += runner.figures(
            Start,
            partial(in_its_folder, measure_start),
            jobs,
            lambda job, start: f"start {job.repeat + 1} of {repeats}: {start.total:.1f} s",
        )
        losses += runner.figures(
            LostJob,
            partial(in_its_folder, measure_loss),
            jobs,
            lambda job, loss: f"loss {job.repeat + 1} of {repeats}: {loss.recovered_s:.1f} s",
        )
    result = summary(starts, losses)
    click.echo("phase       median s (range)", err=as_json)
    for row in result["rows"]:
        click.echo(
            f"{row['phase']:10s}  {row['median_s']:8.2f} ({row['least_s']:.2f}-{row['most_s']:.2f})",
            err=as_json,
        )
    click.echo("a killed job: steps in flight, sampled again; s until noticed, recovered, replaced", err=as_json)
    for loss in losses:
        times = (loss.noticed_s, loss.recovered_s, loss.replaced_s)
        seconds = " ".join(f"{time_s:6.2f}" for time_s in times)
        click.echo(f"{loss.in_flight:3d} {loss.again:3d}  {seconds}", err=as_json)
    if as_json:
        print_measured(result)


def _late_jobs(runner: Runner, jobs: Sequence[SlurmJob], as_json: bool) -> None:
    from benchmarks.slurm import in_its_folder
    from benchmarks.slurm_late import LateJobs, measure_late

    rows = list(
        runner.figures(
            LateJobs,
            partial(in_its_folder, measure_late),
            jobs,
            lambda job, late: f"late jobs {job.repeat + 1} of {len(jobs)}: {late.bound_share:.0%} of the bound",
        )
    )
    click.echo("makespan and bound s, share; when each engine joined s, and its steps", err=as_json)
    for row in rows:
        joined = " ".join(f"{at_s:.0f}:{steps}" for at_s, steps in zip(row.joined_s, row.steps, strict=True))
        click.echo(f"{row.makespan_s:8.1f} {row.bound_s:8.1f} {row.bound_share:5.0%}   {joined}", err=as_json)
    if as_json:
        print_measured({"rows": [asdict(row) for row in rows]})
