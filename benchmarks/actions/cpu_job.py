"""One simulated rollout whose calls run on a CPU pool, and its figures.

A job is picklable; its result depends on it alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from benchmarks.actions.software_workload import SoftwareWorkload, action_trajectories
from benchmarks.opponents.pod_settings import PodSettings
from benchmarks.opponents.pods import SimulatedPods
from benchmarks.opponents.weighted_hosts import HostWeights, WeightedHosts
from heddle_dask.core.nouns import HostDescription
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.sim.clusters import Cluster
from heddle_dask.sim.fleet import SimulatedFleet, equal_hosts
from heddle_dask.sim.program import MakeActionBody, SimulatedCall
from heddle_dask.sim.rollout import rollout_predictor
from heddle_dask.sim.world import SimulatedWorld
from heddle_dask.strategies.presets import build_strategies, tell_costs
from heddle_dask.workloads.planned import PlannedTrajectory

SETUP_SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "hosts": "ARL-Tangram sections 6.1 and 6.3: 5 nodes of 256 cores and 2.4 TB",
        "gpus": "ARL-Tangram section 6.1: up to 48 nodes of 8 Hopper GPUs; here all of them generate",
        "model": "ARL-Tangram section 6.1: Qwen3-32B for coding; TP 4 is an assumption",
        "samples": "16 trajectories a prompt, as Heddle's evaluation",
        "overhead_s": "ARL-Tangram Table 1: 0.024 s for an action of its coding workload; in every arm. This "
        "package adds less (`python -m benchmarks overhead`)",
        "sandbox_start_s": "0 s in every arm, for sandboxes and for pods; swept to 5 s",
        "starts_per_s": "kubernetes/kubernetes#56714: about 300 pods in 10 s on 5,000 nodes; swept",
        "exec_s": "0 s: a command enters a pod as fast as a sandbox; swept to 1 s, the limit of Kubernetes' objective "
        "for 99 % of the calls of its API (sig-scalability/slos)",
        "start_s": "as sandbox_start_s; Kubernetes' objective is 5 s for 99 % of the pods (sig-scalability/slos)",
    }
)

_CONTEXT_TOKENS = 40_960
_SAMPLES = 16
_HOST_BYTES = 2_400_000_000_000
_OTHER_SEED = 1_000_003


@dataclass(frozen=True, slots=True)
class CpuTask:
    """A batch of trajectories of one workload, submitted together."""

    workload: SoftwareWorkload
    trajectories: int
    submitted_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CpuJob:
    """One rollout.

    Attributes
    ----------
    pools
        Hosts of each pool, each with `host_cpus`.
    actions
        The strategy of actions, as an override.
    preset, overrides
        The other strategies.
    warm
        Whether a learned predictor starts with trajectories of another seed.
    pods, weights
        Run actions in pods of Kubernetes instead, or on hosts that know the rest of each.
    overhead_s
        Added to every action, half before and half after it.
    """

    tasks: tuple[CpuTask, ...]
    seed: int
    actions: str = "fcfs-minimum"
    preset: str = "sticky-least-loaded"
    overrides: tuple[str, ...] = ()
    warm: bool = False
    pools: tuple[tuple[str, int], ...] = (("cpu", 5),)
    host_cpus: int = 256
    pods: PodSettings | None = None
    weights: HostWeights | None = None
    overhead_s: float = 0.024
    sandbox_start_s: float = 0.0
    gpus: int = 384
    tp_degree: int = 4

    @property
    def batch(self) -> int:
        """Trajectories of all tasks."""
        return sum(task.trajectories for task in self.tasks)

    @property
    def cores(self) -> int:
        """CPUs of all hosts."""
        return self.host_cpus * sum(hosts for _, hosts in self.pools)


@dataclass(frozen=True, slots=True)
class CpuFigures:
    """Figures of one rollout, over all its actions. ACT: from a program's request of an action until it goes on.

    Attributes
    ----------
    commands_act_s, rewards_act_s
        Mean ACT by stage.
    run_mean_s, queue_mean_s
        Mean seconds on the host, and in its queue.
    step_s
        From the first submission until the last trajectory ended, without training.
    active_share
        Share of the trajectories' lives in actions.
    core_share
        Share of the core seconds until `step_s` that actions were granted (pods: what they could use).
    failed
        Actions that did not end well.
    """

    actions: int
    act_mean_s: float
    act_p99_s: float
    commands_act_s: float
    rewards_act_s: float
    run_mean_s: float
    queue_mean_s: float
    overhead_share: float
    step_s: float
    task_s: tuple[float, ...]
    task_act_s: tuple[float, ...]
    finish_mean_s: float
    active_share: float
    core_share: float
    failed: int
    completed: int


def run_cpu_job(job: CpuJob) -> CpuFigures:
    """Run one rollout.

    Raises
    ------
    BadInput
        Unknown strategies, or numbers out of range.
    """
    collect_seldom()
    plans = [_plans(task, number, job.seed) for number, task in enumerate(job.tasks)]
    everything = [plan for of_task in plans for plan in of_task]
    fleet = _fleet(job)
    strategies = build_strategies(job.preset, seed=job.seed, overrides=(*job.overrides, f"actions={job.actions}"))
    tell_costs(strategies, fleet.beliefs)
    warm = None
    if job.warm and strategies.predictor is not None:
        warm = [
            replace(plan, trajectory_id=f"earlier {plan.trajectory_id}", group_id=f"earlier {plan.group_id}")
            for number, task in enumerate(job.tasks)
            for plan in _plans(task, number, job.seed + _OTHER_SEED)
        ]
    predictor = rollout_predictor(strategies.predictor, everything, warm)
    world = SimulatedWorld(strategies, fleet, everything, predictor=predictor, seed=job.seed)
    world.run()
    return _figures(job, world, plans)


def _plans(task: CpuTask, number: int, seed: int) -> list[PlannedTrajectory]:
    drawn = action_trajectories(
        task.workload,
        trajectories=task.trajectories,
        samples=_SAMPLES,
        seed=seed,
        max_context_tokens=_CONTEXT_TOKENS,
    )
    return [
        replace(
            plan,
            trajectory_id=f"{number}-{plan.trajectory_id}",
            group_id=f"{number}-{plan.group_id}",
            submitted_s=task.submitted_s,
        )
        for plan in drawn
    ]


def _fleet(job: CpuJob) -> SimulatedFleet:
    fleet = Cluster(gpus=job.gpus, tp=job.tp_degree).fleet("qwen3-32b", max_context_tokens=_CONTEXT_TOKENS)
    hosts: list[HostDescription] = []
    first = 0
    for pool, count in job.pools:
        hosts += equal_hosts(count, job.host_cpus, memory_bytes=_HOST_BYTES, pool=pool, first=first)
        first += count
    delays = replace(fleet.delays, action_s=job.overhead_s / 2)
    unmanaged: MakeActionBody | None = None if job.pods is None else partial(SimulatedPods, job.pods)
    if job.weights is not None:
        unmanaged = partial(WeightedHosts, job.weights)
    return replace(
        fleet,
        hosts=tuple(hosts),
        delays=delays,
        sandbox_start_s=job.sandbox_start_s,
        unmanaged=unmanaged,
    )


def _figures(job: CpuJob, world: SimulatedWorld, plans: Sequence[Sequence[PlannedTrajectory]]) -> CpuFigures:
    calls = [call for call in world.calls.all.values() if call.back_s >= 0.0]
    acts_s = [_act_s(call) for call in calls]
    programs = list(world.programs.values())
    step_s = max(program.finished_s for program in programs)
    ended_s = {program.plan.trajectory_id: program.finished_s for program in programs}
    task_of = {plan.trajectory_id: number for number, of_task in enumerate(plans) for plan in of_task}
    by_task: list[list[float]] = [[] for _ in plans]
    for call, act_s in zip(calls, acts_s, strict=True):
        by_task[task_of[call.trajectory_id]].append(act_s)
    lives_s = sum(program.finished_s - program.started_s for program in programs)
    run_s = statistics.fmean(call.run_s for call in calls)
    added_s = job.overhead_s + (job.pods.exec_s if job.pods is not None else 0.0)
    return CpuFigures(
        actions=len(calls),
        act_mean_s=statistics.fmean(acts_s),
        act_p99_s=sorted(acts_s)[max(0, math.ceil(0.99 * len(acts_s)) - 1)],
        commands_act_s=statistics.fmean(_act_s(call) for call in calls if call.work.kind == "tool"),
        rewards_act_s=statistics.fmean(_act_s(call) for call in calls if call.work.kind == "reward"),
        run_mean_s=run_s,
        queue_mean_s=statistics.fmean(acts_s) - run_s - added_s,
        overhead_share=added_s / run_s,
        step_s=step_s,
        task_s=tuple(
            max(ended_s[plan.trajectory_id] for plan in of_task) - task.submitted_s
            for of_task, task in zip(plans, job.tasks, strict=True)
        ),
        task_act_s=tuple(statistics.fmean(each) for each in by_task),
        finish_mean_s=statistics.fmean(ended_s.values()),
        active_share=sum(acts_s) / lives_s,
        core_share=sum(call.run_s * call.units for call in calls) / (step_s * job.cores),
        failed=sum(bool(call.cause) for call in world.calls.all.values()),
        completed=sum(program.status == "completed" for program in programs),
    )


def _act_s(call: SimulatedCall) -> float:
    return call.back_s - call.asked_s
