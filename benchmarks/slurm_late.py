"""Jobs that join over time: how near a rollout comes to the bound of the engines that it had."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distributed import Client

from benchmarks.slurm import SECONDS_PER_TOKEN, SLOTS, BenchAgent, engines, with_jobs
from heddle_dask.live.clusters.slurm.cluster import SlurmCluster
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan
from heddle_dask.live.driver.files.recorded_sessions import control_lines
from heddle_dask.live.driver.inputs.rollout_inputs import Output
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.records.reader import RunReader

JOBS, EVERY_S = 4, 15.0
STEPS, STEP_TOKENS, TRAJECTORIES = 6, 60, 160


@dataclass(frozen=True, slots=True)
class LateJobs:
    """One rollout whose jobs are submitted one after the other.

    Attributes
    ----------
    joined_s
        When each engine joined, seconds after the first.
    steps
        Steps of each engine, in the same order.
    makespan_s
        From the first engine to the last end.
    bound_s
        The least makespan with these engines: their slots from when they joined on, or the longest trajectory alone.
    """

    joined_s: tuple[float, ...]
    steps: tuple[int, ...]
    makespan_s: float
    bound_s: float

    @property
    def bound_share(self) -> float:
        """Share of the makespan that the bound is: 1 is the best there is."""
        return self.bound_s / self.makespan_s


def least_makespan_s(joined_s: Sequence[float], slots: int, work_s: float, longest_s: float) -> float:
    """The time by which slots that join then have had `work_s` seconds, and no less than `longest_s`."""
    joined = sorted(joined_s)
    for number in range(1, len(joined) + 1):
        # With the first `number` engines: sum of slots (T - joined) = work.
        end_s = (work_s / slots + sum(joined[:number])) / number
        if number == len(joined) or end_s <= joined[number]:
            return max(end_s, longest_s)
    raise ValueError("no engine has joined")


async def measure_late(plan: ClusterPlan, model: str, out: Path) -> LateJobs:
    """Begin with one job, and submit another every `EVERY_S` seconds, with the default strategy.

    Raises
    ------
    BadInput
        As `measure_start`.
    """
    plan, group = with_jobs(plan, 1, most=JOBS)
    plan = replace(plan, adaptive=False)  # the demand would ask for a second job, and a third, at once
    async with SlurmCluster(plan, asynchronous=True) as cluster, Client(cluster, asynchronous=True) as client:
        agent = BenchAgent(STEPS, STEP_TOKENS)
        rollout = Rollout(client, env=agent, model=model, engines=engines(model, 1), out=Output(out))
        running = asyncio.ensure_future(rollout.run(TRAJECTORIES))
        for number in range(2, JOBS + 1):
            await asyncio.wait([running], timeout=EVERY_S)
            await cluster.scale(**{group.name: number})
        await running
    return late_jobs([line for _, lines in control_lines(out) for line in lines], RunReader(out))


def late_jobs(lines: Sequence[Any], records: Any) -> LateJobs:
    """The figures of a run from its journal and its store."""
    joined: dict[str, float] = {}
    steps: Counter[str] = Counter()
    for event, _ in lines:
        if event[0] == "EngineJoined":
            joined[event[2][0]] = event[1]
        elif event[0] == "StepFinished":
            steps[event[3]] += event[4] > 0
    first_s = min(joined.values())
    ends_s = max(event[1] for event, _ in lines if event[0] == "TrajectoryEnded")
    tokens = [record.generated_tokens for record in records]
    after_s = tuple(round(at_s - first_s, 1) for at_s in joined.values())
    bound_s = least_makespan_s(after_s, SLOTS, sum(tokens) * SECONDS_PER_TOKEN, max(tokens) * SECONDS_PER_TOKEN)
    return LateJobs(after_s, tuple(steps[name] for name in joined), round(ends_s - first_s, 1), round(bound_s, 1))
