"""Runs actions with cores of their own: plain functions in a process each, coroutines of users in a common one.

Coroutines of this package run on the worker's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType

import cloudpickle

from heddle_dask.isolation.granted import running_with
from heddle_dask.isolation.process_tree import ProcessStat, below, live_processes
from heddle_dask.live.wire.messages import ActionCall
from heddle_dask.live.worker.coroutine_calls import CallLost, CoroutineCalls
from heddle_dask.live.worker.cpu_pool import CoreLease, CpuPool
from heddle_dask.live.worker.process_calls import accepted
from heddle_dask.live.worker.running_call import LimitCause, RunningCall
from heddle_dask.live.worker.tool_processes import MAX_PROCESSES, ToolProcesses
from heddle_dask.sandbox.process_accounting import proportional_bytes
from heddle_dask.sandbox.program_files import disk_usage

_PERIOD_S = 0.1
# A look may take this share of the time: a scratch directory with a million files is looked at seldom.
_MOST_SHARE = 0.1
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NOTHING: Mapping[str, object] = MappingProxyType({})


class ActionRunner:
    """The actions of one tool worker. Belongs to its event loop."""

    def __init__(
        self,
        pool: CpuPool,  # its cores, memory and scratch space
    ) -> None:
        self.pool = pool
        self._watch = UsageWatch()
        self._processes = ToolProcesses(MAX_PROCESSES + pool.resources["cpus"], pool.groups)
        self._processes.start()
        self._coroutines = CoroutineCalls(self._processes)

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
            The function raised, or its process ended. On the worker's loop a function raises what it raises.
        """
        try:
            await self.pool.take(lease, call)
            offered = {**more, "cpus": lease.granted.cpus, "idempotency_key": call.idempotency_key}
            payload = await fetch()
            if call.place == "coroutines":
                with contextlib.suppress(CallLost):
                    return await self._coroutines.run(call.function, payload, offered, lease.granted)
            if call.place != "loop":
                return await self._in_process(payload, offered, lease)
            function, args, kwargs = cloudpickle.loads(payload)
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
        self._coroutines.close()
        await self._processes.close()
        await asyncio.to_thread(self.pool.close)


class UsageWatch:
    """Watches the calls of one worker for the limits that the kernel does not enforce, or enforces without ending them.

    One look at a time, in a thread, for all calls; a short call is never looked at. Belongs to its event loop.
    """

    def __init__(self) -> None:
        self._calls: dict[RunningCall, None] = {}
        self._task: asyncio.Task[None] | None = None

    def begin(self, call: RunningCall) -> None:
        self._calls[call] = None
        if self._task is None:
            self._task = asyncio.create_task(self._watch())

    def end(self, call: RunningCall) -> None:
        self._calls.pop(call, None)

    def close(self) -> None:
        self._calls.clear()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _watch(self) -> None:
        """Look until no call has been running for a period."""
        pause_s = _PERIOD_S
        while True:
            before = dict(self._calls)
            await asyncio.sleep(pause_s)
            if not before and not self._calls:
                break
            known = [call for call in before if call in self._calls and call.pid is not None]
            started_s = time.monotonic()
            exceeding = await asyncio.to_thread(look, known) if known else []
            pause_s = max(_PERIOD_S, (time.monotonic() - started_s) / _MOST_SHARE)
            for call, cause in exceeding:
                if call in self._calls:
                    call.exceed(cause)
        self._task = None


def look(calls: Sequence[RunningCall]) -> list[tuple[RunningCall, LimitCause]]:
    """The calls that use more than they may now, with the cause."""
    processes: dict[int, ProcessStat] | None = None
    found: list[tuple[RunningCall, LimitCause]] = []
    for call in calls:
        group = call.group
        has = () if group is None else group.folders
        if processes is None and ("pids" not in has or ("memory" not in has and call.memory_bytes)):
            processes = live_processes()
        try:
            cause = _in_group(call) or _in_tree(call, processes or {}) or _on_disk(call)
        except OSError:
            continue  # what it has changes while it is looked at; the next look finds it
        if cause is not None:
            found.append((call, cause))
    return found


def _in_group(call: RunningCall) -> LimitCause | None:
    group = call.group
    if group is None:
        return None
    if call.memory_bytes and group.out_of_memory():
        return "memory"
    return "processes" if group.forks_refused() else None


def _in_tree(call: RunningCall, processes: dict[int, ProcessStat]) -> LimitCause | None:
    root = call.pid() if call.pid is not None else 0
    if not root or root not in processes:
        return None
    members = [pid for pid in (root, *below(root, processes)) if pid in processes]
    if sum(processes[pid].threads for pid in members) > call.most_processes:
        return "processes"
    resident_bytes = sum(processes[pid].resident_pages for pid in members) * _PAGE_BYTES
    if not call.memory_bytes or resident_bytes <= call.memory_bytes:
        return None
    # Pages that are shared, with the fork server too, are counted once over all sharers.
    exact_bytes = proportional_bytes(members)
    return "memory" if (resident_bytes if exact_bytes is None else exact_bytes) > call.memory_bytes else None


def _on_disk(call: RunningCall) -> LimitCause | None:
    over = bool(call.scratch) and disk_usage(call.scratch).used_bytes > call.most_scratch_bytes
    return "disk" if over else None
