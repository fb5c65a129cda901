"""A real cluster with emulated engines, and what the live tests do to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import psutil
from distributed import Client

from heddle_dask.engines.spec import EngineSpec
from heddle_dask.live.local_cluster import LocalRolloutCluster

HANG_S = 120


def run(coroutine: Coroutine[Any, Any, Any], hang_s: float = HANG_S) -> Any:
    """Run to the end; the ceiling is for hangs only."""
    return asyncio.run(asyncio.wait_for(coroutine, hang_s))


def emulated(model: str, *, seconds_per_token: float = 0.002, slots: int = 4, **options: Any) -> EngineSpec:
    cost = {"seconds_per_token": seconds_per_token}
    return EngineSpec("emulated", model, slots=slots, max_model_len=4096, cost=cost, **options)


@contextlib.asynccontextmanager
async def cluster(engines: int = 2, **options: Any) -> AsyncIterator[tuple[LocalRolloutCluster, Client]]:
    async with (
        LocalRolloutCluster(engines, tool_cpus=8, dashboard=False, asynchronous=True, **options) as made,
        Client(made, asynchronous=True) as client,
    ):
        yield made, client


async def until(condition: Callable[[], Any]) -> Any:
    for _ in range(6000):
        found = condition()
        if found:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError("condition not met within a minute")


def descendants(word: str) -> list[psutil.Process]:
    """Our own descendants whose command line holds `word`."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any(word in part for part in process.cmdline()):
                found.append(process)
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
