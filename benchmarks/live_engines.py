"""Engines of this machine on which several measured rollouts take turns."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from distributed import Client

from heddle_dask.engines.spec import EngineSpec
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.connection.capacity import wait_for_capacity
from heddle_dask.live.driver.options import Patience
from heddle_dask.live.scheduler.plugin import HeddleScheduler
from heddle_dask.live.worker.rollout_worker import RolloutWorker
from heddle_dask.live.worker.tool_worker import ToolWorker


@asynccontextmanager
async def running_engines(engines: int, spec: EngineSpec, tool_cpus: int | None = None) -> AsyncIterator[Client]:
    """A cluster with engines that outlive the sessions on it.

    Parameters
    ----------
    tool_cpus
        As `LocalRolloutCluster` takes it.
    """
    async with (
        LocalRolloutCluster(engines=engines, tool_cpus=tool_cpus, dashboard=False, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.register_plugin(HeddleScheduler())
        await client.register_plugin(ToolWorker())
        await client.register_plugin(RolloutWorker(spec))
        # Wait for the engines: otherwise the first session would start the missing ones and own them.
        await wait_for_capacity(client, engines, Patience())
        yield client
