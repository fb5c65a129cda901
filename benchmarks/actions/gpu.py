"""ARL-Tangram's experiments on GPUs (its sections 6.2 and 6.3) in virtual time, against its baselines and tuned ones.

Baselines and the pool are tuned on another seed than those that are reported. A ratio is the mean action completion
time (ACT) of an arm over that of the shared pool on the same trajectories: the mean over seeds, the least, the largest.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from benchmarks.actions.gpu_job import GpuFigures, GpuJob, GpuWorkload, evenly, run_gpu_job, varied
from benchmarks.actions.rows import ActionRow
from benchmarks.experiments import Experiment, Study, experiment
from benchmarks.tables import ratio_fields

BATCHES = (256, 1024, 1536, 2048, 2560, 3072)
NODE_SETS = tuple((8,) * (gpus // 8) + ((4,) if gpus % 8 else ()) for gpus in range(8, 41, 4))
SWEPT: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "skew": (0.0, 0.5, 1.0),
        "token_s": (0.0125, 0.025, 0.05),
        "link_bytes_s": (25e9, 50e9),
        "setup_s": (0.05, 0.5),
        "batch_cost": (0.25, 1.0),
    }
)
PAPER = MappingProxyType({1024: "3.4", 2048: "18.1"})
PAPER_SERVERLESS = MappingProxyType({1024: "101.8", 2048: "time-outs"})
_TUNING_SEED = 1_000


def figures_of(study: Study, jobs: Sequence[GpuJob]) -> list[GpuFigures]:
    """The figures of each job."""
    return study.runner.figures(GpuFigures, run_gpu_job, jobs, _told)


def _told(job: GpuJob, figures: GpuFigures) -> str:
    return f"{job.batch} trajectories, {job.gpus} GPUs, {job.arm}, seed {job.seed}: ACT {figures.act_s:.3f} s"


def pool(batch: int, seed: int, workload: GpuWorkload | None = None) -> GpuJob:
    """The shared pool: elastic sizes, and three services in the memory of a GPU (49 of 80 GB of weights)."""
    work = workload or GpuWorkload()
    return GpuJob(batch, seed, "pool", work, sizes=(4, 8), models=3, actions="elastic,order=fcfs")


def paper_pool(job: GpuJob) -> GpuJob:
    """The pool as the paper has it: four GPUs for each service, and nothing else in their memory."""
    return replace(job, sizes=(4,), models=1, actions="fcfs-minimum")


def static(job: GpuJob, places: int = 32) -> GpuJob:
    """One copy of each service on four GPUs of its own, with continuous batching."""
    services = job.workload.services
    return replace(job, arm="static", sizes=(4,), places=places, replicas=(1,) * services, models=1)


def serverless(job: GpuJob, places: int = 1, start_s: float = 6.0) -> GpuJob:
    """A serverless loader on the same pool: one request at a time on an instance, which starts where it is missing."""
    base = paper_pool(job)
    return replace(base, arm="serverless", places=places, serverless_s=start_s)


def tuned_pool(study: Study, job: GpuJob) -> GpuJob:
    """The better of two pools for this batch: three services in a GPU's memory, or smaller sizes and one service."""
    return _best(study, job, [job, replace(job, sizes=(2, 4, 8), models=1)])


def tuned_static(study: Study, job: GpuJob) -> GpuJob:
    """The best static deployment for this batch: copies by share, GPUs of a copy, requests of a batch."""
    bases = [static(job), evenly(static(job), 10, (4,)), evenly(static(job), 20, (2,))]
    candidates = [replace(base, places=places) for base in bases for places in (1, 8, 32)]
    return _best(study, job, candidates)


def tuned_serverless(study: Study, job: GpuJob) -> GpuJob:
    """The best serverless loader for this batch: the fastest start, and requests of a batch."""
    return _best(study, job, [serverless(job, places, 4.1) for places in (1, 8, 32)])


def _best(study: Study, job: GpuJob, candidates: Sequence[GpuJob]) -> GpuJob:
    figures = figures_of(study, [replace(candidate, seed=_TUNING_SEED) for candidate in candidates])
    best, _ = min(zip(candidates, figures, strict=True), key=lambda pair: pair[1].act_s)
    return replace(best, seed=job.seed)


def batch_sizes(study: Study, batches: Iterable[int] = BATCHES, services: int = 9) -> list[ActionRow]:
    """Batches of teacher requests on 40 GPUs, against one static service per model and a serverless loader."""
    rows: list[ActionRow] = []
    for batch in batches:
        ours = [tuned_pool(study, pool(batch, seed, GpuWorkload(services=services))) for seed in study.seeds]
        arms: dict[str, tuple[list[GpuJob], str]] = {
            "shared pool": (ours, ""),
            "shared pool, size 4, one service per GPU": ([paper_pool(job) for job in ours], ""),
            "static, one per model": ([static(job) for job in ours], PAPER.get(batch, "")),
            "static, tuned": ([tuned_static(study, job) for job in ours], ""),
            "serverless": ([serverless(job) for job in ours], PAPER_SERVERLESS.get(batch, "")),
            "serverless, tuned": ([tuned_serverless(study, job) for job in ours], ""),
        }
        name = f"gpu-batch, {services} services"
        rows += [_row(study, name, arm, jobs, ours, paper) for arm, (jobs, paper) in arms.items()]
    return rows


def ten_services(study: Study) -> list[ActionRow]:
    """The same with 10 services, which have all 40 GPUs in the static deployment."""
    return batch_sizes(study, (1024, 2048, 3072), services=10)


def fewer_gpus(study: Study, batch: int = 1024, services: int = 10) -> list[ActionRow]:
    """The fewest GPUs at which the pool's ACT is not above that of the static services; ratio: share of their GPUs."""
    rows: list[ActionRow] = []
    for token_s in SWEPT["token_s"]:
        for skew in SWEPT["skew"]:
            work = GpuWorkload(services=services, skew=skew, token_s=token_s)
            jobs = [tuned_pool(study, pool(batch, seed, work)) for seed in study.seeds]
            for name, others in _static_arms(study, jobs).items():
                rows.append(_fewest(study, jobs, others, name))
    return rows


def _static_arms(study: Study, jobs: Sequence[GpuJob]) -> dict[str, list[GpuJob]]:
    return {
        "one per model": [static(job) for job in jobs],
        "tuned": [tuned_static(study, job) for job in jobs],
    }


def _fewest(study: Study, jobs: Sequence[GpuJob], others: Sequence[GpuJob], name: str) -> ActionRow:
    """The row of the smallest pool that is as fast as these static deployments; by bisection, as more GPUs help."""
    target_s = statistics.fmean(one.act_s for one in figures_of(study, others))

    def act_s(nodes: tuple[int, ...]) -> float:
        sized = [replace(job, nodes=nodes) for job in jobs]
        return statistics.fmean(one.act_s for one in figures_of(study, sized))

    number = bisect_left(NODE_SETS, True, key=lambda nodes: act_s(nodes) <= target_s)
    nodes = NODE_SETS[min(number, len(NODE_SETS) - 1)]
    sized, mean_s = [replace(job, nodes=nodes) for job in jobs], act_s(nodes)
    work, share = jobs[0].workload, sized[0].gpus / others[0].gpus
    found = "" if mean_s <= target_s else "not reached; "
    row = _row(study, "gpu-fewer", f"shared pool, as fast as static, {name}", sized, sized, "0.29")
    note = f"{found}ratio: share of {others[0].gpus} GPUs (static ACT {target_s:.2f} s); skew {work.skew:g}"
    return replace(row, ratio=share, ratio_least=0.0, ratio_most=0.0, note=f"{note}, {work.token_s * 1e3:g} ms a token")


def swept_numbers(study: Study, batches: Iterable[int] = (1024, 2048)) -> list[ActionRow]:
    """The ratios of static services, as given and tuned, over each swept constant, and over extremes of arrivals."""
    rows: list[ActionRow] = []
    for batch in batches:
        for name, values in SWEPT.items():
            for value in values:
                ours = [tuned_pool(study, varied(pool(batch, seed), **{name: value})) for seed in study.seeds]
                note = f"{name} = {value:g}"
                rows += _against_static(study, batch, ours, note)
        for token_s, skew in ((0.05, 0.0), (0.0125, 1.0)):
            jobs = [varied(pool(batch, seed), token_s=token_s, skew=skew) for seed in study.seeds]
            ours = [tuned_pool(study, job) for job in jobs]
            rows += _against_static(study, batch, ours, f"token_s = {token_s:g}, skew = {skew:g}")
    return rows


def _against_static(study: Study, batch: int, ours: Sequence[GpuJob], note: str) -> list[ActionRow]:
    rows: list[ActionRow] = []
    for arm, jobs in _static_arms(study, ours).items():
        row = _row(study, "gpu-sweep", f"static, {arm}", jobs, ours, PAPER.get(batch, ""))
        rows.append(replace(row, note=note))
    return rows


def overheads(study: Study) -> list[ActionRow]:
    """Mean execution, queueing and load time of a teacher action; the paper has 0.20 s of overhead at 2,048."""
    rows: list[ActionRow] = []
    papers = {2048: "overhead 0.201 s", 3072: "overhead 0.240 s"}
    for batch, paper in papers.items():
        ours = [tuned_pool(study, pool(batch, seed)) for seed in study.seeds]
        for arm, jobs in (
            ("shared pool", ours),
            ("shared pool, size 4, one service per GPU", [paper_pool(job) for job in ours]),
        ):
            figures = figures_of(study, jobs)
            run_s, queue_s, over_s = (
                statistics.fmean(getattr(each, part) for each in figures) for part in ("run_s", "queue_s", "overhead_s")
            )
            loads = round(statistics.fmean(each.loads for each in figures))
            note = f"runs {run_s:.3f} s, waits {queue_s:.3f} s, load {over_s:.3f} s, {loads} loads"
            rows.append(replace(_row(study, "gpu-overhead", arm, jobs, ours, paper), note=note))
    return rows


def _row(
    study: Study, experiment: str, arm: str, jobs: Sequence[GpuJob], ours: Sequence[GpuJob], paper: str = ""
) -> ActionRow:
    figures = figures_of(study, jobs)
    ratios = [one.act_s / our.act_s for one, our in zip(figures, figures_of(study, ours), strict=True)]

    def mean(part: str) -> float:
        return statistics.fmean(getattr(each, part) for each in figures)

    return ActionRow(
        experiment,
        arm,
        batch=jobs[0].batch,
        act_mean_s=mean("act_s"),
        act_p99_s=mean("act_p99_s"),
        step_s=mean("step_s"),
        gpus=jobs[0].gpus,
        overhead_share=mean("overhead_s") / mean("run_s"),
        **ratio_fields(ratios),
        paper_ratio=paper,
        seeds=len(jobs),
        note=_note(jobs[0]),
    )


def _note(job: GpuJob) -> str:
    if job.arm == "static":
        copies = f"{sum(job.replicas)} copies of {job.sizes[0]} GPUs"
        return f"{copies}, batches of {job.places}"
    if job.arm == "serverless":
        return f"{job.serverless_s:g} s to start, batches of {job.places}"
    sizes = ", ".join(map(str, job.sizes))
    return f"sizes {sizes}; services in the memory of a GPU: {job.models}"


GPU_EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {
        "gpu-batch": experiment(batch_sizes),
        "gpu-batch-10": experiment(ten_services),
        "gpu-fewer": experiment(fewer_gpus),
        "gpu-sweep": experiment(swept_numbers),
        "gpu-overhead": experiment(overheads),
    }
)
