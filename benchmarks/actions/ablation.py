"""Which options of the action strategies are worth their place: arms on the small world of `action_world`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.actions.action_world import AblationBatch, WorldFigures, WorldJob, run_world
from benchmarks.actions.rows import ActionRow
from benchmarks.experiments import Study
from benchmarks.opponents import FIXED, PER_TRAJECTORY, WORKER_POOLS

ARMS = (
    "fcfs-minimum",
    f"{FIXED},units=2",
    f"{FIXED},units=4",
    f"{FIXED},units=8",
    f"{FIXED},units=16",
    f"{PER_TRAJECTORY},cpus=4",
    f"{WORKER_POOLS},workers=32,kinds=tool:96x1/reward:16x4",
    "elastic,start_efficiency=1,depth=0",
    "elastic,start_efficiency=1",
    "elastic,start_efficiency=1,depth=6,ahead=all",
    "elastic,depth=0",
    "elastic",
    "elastic,start_efficiency=0.8",
    "elastic,order=tail",
)
_BATCHES = (AblationBatch(64), AblationBatch(128))
ABLATION_JOBS = (
    *(WorldJob(batch, arm) for batch in _BATCHES for arm in ARMS),
    *(WorldJob(batch, "elastic", known=False) for batch in _BATCHES),
)


def ablation_rows(study: Study, jobs: Sequence[WorldJob] = ABLATION_JOBS) -> list[ActionRow]:
    """Options of the action strategies, one by one, on one worker of 128 CPUs, where thinking takes its planned time.

    Raises
    ------
    BadInput
        Unknown strategy or option.
    """
    return [_row(study, job) for job in jobs]


def _row(study: Study, job: WorldJob) -> ActionRow:
    jobs = [replace(job, seed=seed) for seed in study.seeds]
    figures = study.runner.figures(WorldFigures, run_world, jobs, _told)
    tool_s, reward_s = (
        statistics.fmean(each) for each in zip(*((one.tool_s, one.reward_s) for one in figures), strict=True)
    )
    learned = "" if job.known else "; speed-ups learned within the batch"
    return ActionRow(
        "ablation",
        job.actions,
        job.batch.batch,
        act_mean_s=statistics.fmean(each.mean_s for each in figures),
        step_s=statistics.fmean(each.makespan_s for each in figures),
        cores=job.hosts * job.cpus,
        seeds=len(figures),
        note=f"tools {tool_s:.2f} s, rewards {reward_s:.2f} s{learned}",
    )


def _told(job: WorldJob, figures: WorldFigures) -> str:
    return f"{job.batch.batch} trajectories, {job.actions}, seed {job.seed}: {figures.mean_s:.2f} s"
