"""The API pool at its quota on this machine, against a real HTTP server that enforces the quota."""

from __future__ import annotations

import asyncio
import statistics
import time

from distributed import Client

from benchmarks.actions.api_server import api_server
from benchmarks.actions.rows import ActionRow
from benchmarks.emulated_rollouts import emulated
from heddle_dask.apis.http_calls import http_call
from heddle_dask.core.needs import Needs
from heddle_dask.core.resources import ApiQuota, QuotaWindow
from heddle_dask.environments.base import Context, Task
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.inputs.pools import Pools
from heddle_dask.live.driver.rollout import Rollout


def live_api_rows(model: str, trajectories: int = 8, calls_each: int = 25, seconds: float = 1.0) -> list[ActionRow]:
    """The pool at its quota, against a real HTTP server on this machine that enforces it and counts rejections."""
    rows = []
    for within_s in (None, 0.25):
        quota = ApiQuota("search", 8, (QuotaWindow(20, seconds),), begins_within_s=within_s)
        rows.append(asyncio.run(_live_row(model, quota, trajectories, calls_each)))
    return rows


async def _live_row(model: str, quota: ApiQuota, trajectories: int, calls_each: int) -> ActionRow:
    needs = Needs(api={"search": 1})
    acts: list[float] = []
    async with api_server(quota, latency_s=0.05) as server:

        async def solve(task: Task, ctx: Context) -> float:
            async def ask() -> None:
                begun_s = time.monotonic()
                await ctx.call(http_call, "GET", server.url, needs=needs, label="search")
                acts.append(time.monotonic() - begun_s)

            await asyncio.gather(*(ask() for _ in range(calls_each)))
            return 1.0

        spec = emulated(model, 0.001, slots=4, max_model_len=4096)
        async with (
            LocalRolloutCluster(1, tool_cpus=4, dashboard=False, asynchronous=True) as cluster,
            Client(cluster, asynchronous=True) as client,
            Rollout(client, env=solve, model=model, engines=spec, pools=Pools(quotas=[quota])) as rollout,
        ):
            await rollout.run(trajectories)
        (window,) = quota.windows
        calls = len(server.begun_s)
        took_s = max(server.begun_s) - min(server.begun_s)
        # Without its last period, which need not be full.
        at_quota_s = (-(-calls // window.most) - 1) * window.seconds
        used = at_quota_s / took_s
    within = "unknown" if quota.begins_within_s is None else f"{quota.begins_within_s:g} s"
    return ActionRow(
        experiment="api-live",
        arm="pool",
        batch=trajectories,
        act_mean_s=statistics.fmean(acts),
        act_p99_s=sorted(acts)[int(0.99 * (len(acts) - 1))],
        step_s=took_s,
        note=f"{calls} calls, {server.rejected} rejected, {used:.1%} of {window.most} calls per {window.seconds:g} s; "
        f"a call begins within: {within}",
    )
