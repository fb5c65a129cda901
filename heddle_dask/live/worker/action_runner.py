"""Runs actions with cores of their own: in a process each, or on the worker's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

import cloudpickle

from heddle_dask.isolation.granted import running_with
from heddle_dask.live.wire.messages import ActionCall
from heddle_dask.live.worker.cpu_pool import CoreLease, CpuPool
from heddle_dask.live.worker.tool_fork_server import accepted
from heddle_dask.live.worker.tool_processes import MAX_PROCESSES, ToolProcesses
from heddle_dask.live.worker.usage_watch import UsageWatch

NOTHING: Mapping[str, object] = MappingProxyType({})


class ActionRunner:
    """The actions of one tool worker. Belongs to its event loop.

    Parameters
    ----------
    pool
        Its cores, memory and scratch space.
    """

    def __init__(self, pool: CpuPool) -> None:
        self.pool = pool
        self._watch = UsageWatch()
        self._processes = ToolProcesses(MAX_PROCESSES + pool.resources["cpus"], pool.groups)
        self._processes.start()

    async def run(
        self,
        call: ActionCall,
        fetch: Callable[[], Awaitable[bytes]],
        lease: CoreLease,
        more: Mapping[str, object] = NOTHING,
    ) -> bytes:
        """Run an action; returns its pickled value.

        When this returns or raises, also because it was cancelled, all that the action has started has ended, and its
        cores are free.

        Parameters
        ----------
        fetch
            Brings the pickled (function, args, kwargs).
        lease
            What was granted; takes what the action has printed.
        more
            Keyword arguments for functions that have parameters of these names, beside ``cpus`` and
            ``idempotency_key``.

        Raises
        ------
        LimitExceeded
            It used more than it may.
        ToolRaised, ToolProcessEnded
            A plain function raised, or its process ended. A coroutine function raises what it raises.
        """
        try:
            await self.pool.take(lease, call)
            offered = {**more, "cpus": lease.granted.cpus, "idempotency_key": call.idempotency_key}
            if not call.on_loop:
                return await self._in_process(await fetch(), offered, lease)
            function, args, kwargs = cloudpickle.loads(await fetch())
            with running_with(lease.granted):
                value = await function(*args, **{**kwargs, **accepted(function, offered)})
            pickled: bytes = cloudpickle.dumps(value)
            return pickled
        finally:
            await self.pool.give_back(lease)

    async def _in_process(self, payload: bytes, offered: dict[str, object], lease: CoreLease) -> bytes:
        self._watch.begin(lease.call)
        try:
            return await self._processes.run(payload, offered, lease.call)
        finally:
            self._watch.end(lease.call)

    async def close(self) -> None:
        """End all processes and give up the cores."""
        self._watch.close()
        await self._processes.close()
        await asyncio.to_thread(self.pool.close)
