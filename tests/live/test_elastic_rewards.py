"""Rewards on an adaptive pool: tool workers come with the waiting rewards and go after them; one dies in between."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from distributed import Client
from worlds.live_world import emulated, kill, run, until

from heddle_dask import Rollout, SlurmCluster
from heddle_dask.environments.base import Context, Task
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.rewards import RewardContext, Transcript
from heddle_dask.live.clusters.slurm.scaling import ScalingRule
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan, WorkerGroup

pytestmark = pytest.mark.cluster
# Workers cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def _until_there(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.02)


class HeldRewards(FunctionEnvironment):
    """One short step, and a reward that holds a CPU until a file is there."""

    def __init__(self, go: Path) -> None:
        super().__init__(self.attempt, name="held rewards")
        self.go = go

    async def attempt(self, task: Task, ctx: Context) -> None:
        ctx.append("user", "hello")
        await ctx.generate(max_tokens=2, ignore_eos=True)

    async def reward(self, task: Task, transcript: Transcript, ctx: RewardContext) -> float:
        await ctx.call(_until_there, str(self.go), label="held")
        return 1.0


def _plan(tmp_path: Path) -> ClusterPlan:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    groups = {
        "gpu": WorkerGroup("gpu", "rollout"),
        "cpu": WorkerGroup("cpu", "tool", cpus=2, minimum=1, maximum=3, drain_s=10.0),
    }
    return ClusterPlan(groups=groups, backend="local", adaptive=True, logs=tmp_path / "logs", scratch=str(scratch))


def test_no_reward_is_lost_while_its_workers_come_and_go(model_dir: str, tmp_path: Path) -> None:
    async def body() -> None:
        rule = ScalingRule(tool_target_s=0.5, hold_s=1.0)
        cluster = SlurmCluster(_plan(tmp_path), rule=rule, asynchronous=True)
        async with cluster, Client(cluster, asynchronous=True) as client:

            def tool_jobs() -> list[Any]:
                present = {job.name for job in cluster._table.present.values()}
                jobs = (job for job in cluster.jobs() if job.group == "cpu" and job.name in present)
                return [job for job in jobs if job.joined_s is not None and not job.leaving]

            engine = emulated(model_dir, slots=16)
            async with Rollout(client, env=HeldRewards(tmp_path / "go"), model=model_dir, engines=engine) as rollout:
                running = asyncio.ensure_future(rollout.run(12))
                await until(lambda: len(tool_jobs()) >= 2)
                kill(int(tool_jobs()[-1].job_id))
                (tmp_path / "go").touch()
                batch = await running
                assert [record.reward for record in batch] == [1.0] * 12
                assert {record.reward_cause for record in batch} == {""}
            await until(lambda: cluster.wanted["cpu"] == 1)

    run(body())
