"""Wall-clock limits: of a trajectory, of a tool call, and of a whole run. On a real cluster."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

import pytest
from worlds.live_world import emulated, run
from worlds.shared_cluster import shared_cluster

from heddle_dask.environments.base import Context, Task
from heddle_dask.live.driver.inputs.rollout_inputs import Output
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.driver.rollout import Rollout

pytestmark = pytest.mark.cluster

HOUR_S = 3600.0


async def hangs_in_its_program(task: Task, ctx: Context) -> float:
    ctx.append("user", task.prompt)
    await ctx.generate(max_tokens=4, ignore_eos=True)
    await asyncio.sleep(HOUR_S)
    return 1.0


async def hangs_in_its_step(task: Task, ctx: Context) -> float:
    ctx.append("user", task.prompt)
    await ctx.generate(max_tokens=3_000, ignore_eos=True)
    return 1.0


async def hangs_in_a_plain_tool(task: Task, ctx: Context) -> float:
    await ctx.call(time.sleep, HOUR_S, cpus=(0, 0), timeout_s=0.5)
    return 1.0


async def calls_a_plain_tool(task: Task, ctx: Context) -> float:
    return float(await ctx.call(max, 1, 2))


async def hangs_in_its_tool(task: Task, ctx: Context) -> float:
    ctx.append("user", task.prompt)
    await ctx.call(asyncio.sleep, HOUR_S, timeout_s=math.inf if task.prompt == "no limit" else None)
    return 1.0


def test_what_hangs_ends_with_its_cause_and_a_run_that_took_too_long_can_be_resumed(
    model_dir: str, tmp_path: Path
) -> None:
    async def body() -> None:
        async with shared_cluster(1) as client:

            def rollout(env: object, budget: Budget, out: Output | None = None, told: object = None) -> Rollout:
                return Rollout(
                    client,
                    env=env,
                    model=model_dir,
                    engines=emulated(model_dir, seconds_per_token=0.01),
                    budget=budget,
                    out=out,
                    progress=told or (lambda line: None),
                )

            limit = Budget(max_trajectory_s=1.0, max_step_tokens=3_000)
            for env in (hangs_in_its_program, hangs_in_its_step):
                batch = await rollout(env, limit).run(["a", "b"])
                assert {(t.status, t.cause) for t in batch} == {("truncated", "time")}
                assert {t.detail for t in batch} == {"it took longer than 1 s"}

            batch = await rollout(hangs_in_its_tool, Budget(tool_timeout_s=0.5)).run(["a"])
            assert [(t.status, t.cause, t.actions[0].status) for t in batch] == [("failed", "action", "timeout")]
            # More than run at once; none of them keeps its place.
            batch = await rollout(hangs_in_a_plain_tool, Budget()).run([str(n) for n in range(70)])
            assert {(t.status, t.actions[0].status) for t in batch} == {("failed", "timeout")}
            batch = await rollout(calls_a_plain_tool, Budget(tool_timeout_s=60.0)).run(["a"])
            assert [(t.status, t.reward) for t in batch] == [("completed", 2.0)]
            limit = Budget(tool_timeout_s=0.2, max_trajectory_s=1.5)
            batch = await rollout(hangs_in_its_tool, limit).run(["no limit"])
            assert [(t.status, t.cause) for t in batch] == [("truncated", "time")]

            told: list[str] = []
            out = tmp_path / "run.zarr"
            batch = await rollout(hangs_in_its_program, Budget(max_run_s=2.0), Output(out), told.append).run(["a"])
            assert [t.status for t in batch] == ["aborted"]
            assert "the run has reached its limit of 2 s: it ends, and can be resumed" in told
            again = rollout(hangs_in_its_program, Budget(max_trajectory_s=1.0), Output(out, "resume"))
            batch = await again.run(["a"])
            assert [(t.status, t.cause, len(t.steps)) for t in batch] == [("truncated", "time", 1)]

    run(body())
