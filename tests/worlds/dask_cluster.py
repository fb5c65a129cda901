"""An in-process Dask cluster for tests of what we assume about `distributed`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import dask
from distributed import Client, LocalCluster, Scheduler, Worker

Body = Callable[[Client, Scheduler, list[Worker]], Awaitable[None]]


def with_cluster(body: Body, workers: int = 1, **resources: float) -> None:
    """Run `body` on an in-process cluster whose state machines validate every transition."""

    async def run() -> None:
        config = {
            "distributed.scheduler.validate": True,
            "distributed.worker.validate": True,
            "distributed.scheduler.work-stealing-interval": "10ms",
            # Tests of addresses where no process listens wait this long.
            "distributed.comm.timeouts.connect": "5s",
        }
        with dask.config.set(config):
            async with (
                LocalCluster(
                    n_workers=workers,
                    processes=False,
                    threads_per_worker=64,
                    resources=resources or {"LLM": 1},
                    dashboard_address="127.0.0.1:0",
                    asynchronous=True,
                ) as cluster,
                Client(cluster, asynchronous=True) as client,
            ):
                await body(client, cluster.scheduler, [w for w in cluster.workers.values()])

    asyncio.run(asyncio.wait_for(run(), 120))
