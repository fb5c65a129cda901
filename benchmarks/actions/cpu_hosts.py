"""Elastic actions on hosts of ordinary and of large size, against every simple alternative at its best."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.actions.cpu import pods_of, with_workload
from benchmarks.actions.cpu_job import CpuFigures, CpuJob, CpuTask, run_cpu_job
from benchmarks.actions.rows import ActionRow
from benchmarks.actions.software_workload import SoftwareWorkload
from benchmarks.experiments import Study
from benchmarks.opponents import FIXED, PAPER
from benchmarks.opponents.weighted_hosts import HostWeights
from benchmarks.tables import ratio_fields

UNITS = (1, 2, 4, 8, 16, 32)
GPUS_PER_CORE = 0.3
"""As of the paper's cluster: 384 GPUs that generate beside 1,280 cores."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Hosts of one size, and trajectories for each of their cores."""

    hosts: int
    cpus: int
    per_core: int

    @property
    def name(self) -> str:
        return f"{self.hosts} x {self.cpus} cores, {self.per_core} trajectories a core"

    def job(self, actions: str, profiles: str = "none") -> CpuJob:
        cores = self.hosts * self.cpus
        batch = max(16, self.per_core * cores)
        gpus = max(4, round(GPUS_PER_CORE * cores / 4) * 4)
        tasks = (CpuTask(SoftwareWorkload(), batch),)
        job = CpuJob(tasks, 0, actions, pools=(("cpu", self.hosts),), host_cpus=self.cpus, gpus=gpus)
        return with_workload(job, profiles=profiles)


POOLS = (
    *(
        Pool(hosts, cpus, load)
        for hosts, cpus in ((8, 4), (1, 8), (4, 8), (4, 16), (1, 64), (2, 64))
        for load in (1, 2)
    ),
    Pool(1, 256, 1),
)


SMALL_POOLS = (Pool(8, 4, 1), Pool(8, 4, 2), Pool(1, 8, 1))
WEIGHTS = tuple((first, power) for power in (1.0, 2.0, 3.0) for first in (1.0, 4.0, 16.0, 64.0, 256.0))


def host_rows(study: Study, pools: Sequence[Pool] = POOLS) -> list[ActionRow]:
    """Hosts of 4 to 256 cores: elastic, its least, each fixed number of units, each limit of pods, the paper's form."""
    return [row for pool in pools for row in _rows(study, f"cpu-hosts, {pool.name}", _arms(pool))]


def weight_rows(study: Study) -> list[ActionRow]:
    """Hosts of 4 and 8 cores: what weights by exact remaining seconds would reach, beside the arms of cpu-hosts."""
    rows: list[ActionRow] = []
    for pool in SMALL_POOLS:
        plain = pool.job("fcfs-minimum")
        weights = {
            f"weights {first:g} x (8 s / rest) ^ {power:g}": replace(
                plain, weights=HostWeights(pool.hosts, pool.cpus, first, power)
            )
            for first, power in WEIGHTS
        }
        rows += _rows(study, f"cpu-weights, {pool.name}", {**_arms(pool), **weights})
    return rows


def _rows(study: Study, experiment: str, arms: Mapping[str, CpuJob]) -> list[ActionRow]:
    rows: list[ActionRow] = []
    figures = {name: _figures(study, job) for name, job in arms.items()}
    ours = figures["elastic"]
    for name, of_arm in figures.items():
        act = [each.act_mean_s / own.act_mean_s for each, own in zip(of_arm, ours, strict=True)]
        rewards_s, own_s = (statistics.fmean(one.rewards_act_s for one in each) for each in (of_arm, ours))
        rows.append(
            ActionRow(
                experiment,
                name,
                arms[name].batch,
                act_mean_s=statistics.fmean(one.act_mean_s for one in of_arm),
                act_p99_s=statistics.fmean(one.act_p99_s for one in of_arm),
                step_s=statistics.fmean(one.step_s for one in of_arm),
                cores=arms[name].cores,
                seeds=len(of_arm),
                step_ratio=statistics.fmean(o.step_s / m.step_s for o, m in zip(of_arm, ours, strict=True)),
                note=f"rewards {rewards_s:.2f} s, ratio {rewards_s / own_s:.3f}",
                **ratio_fields(act),
            )
        )
    return rows


def _arms(pool: Pool) -> Mapping[str, CpuJob]:
    """Ours without a word on durations, and told of them as a user may; arms that know seconds exactly say so."""
    plain = pool.job("fcfs-minimum")
    limits = [units for units in UNITS if 2 <= units <= pool.cpus]
    return {
        "elastic": pool.job("elastic"),
        "elastic, told suites' seconds within a factor of 2": pool.job("elastic", "wrong"),
        "elastic, knows each suite's seconds": pool.job("elastic", "true"),
        "least units": plain,
        **{f"fixed {units}": pool.job(f"{FIXED},units={units}") for units in limits},
        **{f"pods of at most {units}": pods_of(plain, limit_cpus=float(units), starts_per_s=0.0) for units in limits},
        "paper's form, knows each suite's seconds": pool.job(PAPER, "true"),
    }


def _figures(study: Study, job: CpuJob) -> list[CpuFigures]:
    jobs = [replace(job, seed=seed) for seed in study.seeds]
    return study.runner.figures(CpuFigures, run_cpu_job, jobs, _told)


def _told(job: CpuJob, figures: CpuFigures) -> str:
    return f"{job.cores} cores, {job.batch} trajectories, seed {job.seed}: ACT {figures.act_mean_s:.2f} s"
