"""Runs one confined program on the event loop, from its start to the end of its last process.

Reads at most the allowed output, watches wall clock, processes, memory and disk, and in every case (end, limit,
cancellation, error) kills all remaining processes before it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

from heddle_dask.sandbox.child import Child
from heddle_dask.sandbox.confinement import PreparedRun
from heddle_dask.sandbox.limits import SandboxLimits
from heddle_dask.sandbox.outcome import Cause, RawRun
from heddle_dask.sandbox.process_accounting import ProcessAccounting, proportional_bytes, scan

# Upper limit for the kernel to clean up killed processes, which usually takes milliseconds.
_REAP_S = 10.0
_FIRST_LOOK_S = 0.1
_LONGEST_LOOK_S = 0.5


async def run_confined(
    prepared: PreparedRun, order: Mapping[str, Any], limits: SandboxLimits, accounting: ProcessAccounting
) -> RawRun:
    """Start the prepared program, send its order, and wait until all its processes have ended.

    Raises
    ------
    OSError
        The program could not be started.
    """
    started_s = time.monotonic()
    child = Child(prepared, marshal.dumps(dict(order)), limits.output_bytes)
    exit_seen = asyncio.create_task(child.exited.wait())
    watch = asyncio.create_task(_watch(prepared, child.pid, limits, accounting))
    over = asyncio.create_task(child.output_over.wait())
    try:
        stopped_for = await _until_end(exit_seen, watch, over, timeout_s=limits.wall_s)
    finally:
        for task in (exit_seen, watch, over):
            task.cancel()
        try:
            await _leave_nothing(child, prepared)
        finally:
            child.close()
    if child.output_over.is_set() and not stopped_for:
        stopped_for = "output"
    return RawRun(
        output=bytes(child.output),
        exit_status=128 + signal.SIGKILL if child.exit_status is None else child.exit_status,
        stopped_for=stopped_for,
        seconds=time.monotonic() - started_s,
    )


async def _until_end(
    exit_seen: asyncio.Task[Any],
    watch: asyncio.Task[Any],
    over: asyncio.Task[Any],
    *,
    timeout_s: float,
) -> Cause:
    """Wait for the program's exit or the first exceeded limit; returns the cause."""
    done, _ = await asyncio.wait(
        [exit_seen, watch, over],
        timeout=timeout_s,
        return_when=asyncio.FIRST_COMPLETED,
    )
    if over in done:
        return "output"
    if exit_seen in done:
        return ""
    if watch in done:
        cause: Cause = watch.result()
        return cause
    return "timeout"


async def _watch(
    prepared: PreparedRun, root: int, limits: SandboxLimits, accounting: ProcessAccounting
) -> Cause:
    """Return the limit that the run as a whole exceeds; checks become rarer as the run gets longer."""
    pause_s = _FIRST_LOOK_S
    while True:
        await asyncio.sleep(pause_s)
        pause_s = min(_LONGEST_LOOK_S, pause_s * 1.5)
        usage = await accounting.usage(prepared, root)
        if usage.threads - prepared.wrapper_processes > limits.processes:
            return "processes"
        if usage.resident_bytes > limits.memory_bytes:
            exact_bytes = await asyncio.to_thread(proportional_bytes, usage.pids)
            if (usage.resident_bytes if exact_bytes is None else exact_bytes) > limits.memory_bytes:
                return "memory"
        disk = await asyncio.to_thread(prepared.disk_usage, usage.pids[prepared.wrapper_processes :])
        if disk is not None and (disk.used_bytes > limits.disk_bytes or disk.files > limits.files):
            return "files"


async def _leave_nothing(child: Child, prepared: PreparedRun) -> None:
    """Kill every process of the run, wait until the first one is reaped, and read the last output."""
    try:
        # Passed to a thread before the first await, so that a second cancellation cannot prevent it.
        await asyncio.to_thread(_kill_all, child.pid, not child.exited.is_set(), prepared)
        await asyncio.wait_for(child.exited.wait(), _REAP_S)
    finally:
        if not child.exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    await asyncio.wait_for(child.output_ended.wait(), _REAP_S)


def _kill_all(root: int, running: bool, prepared: PreparedRun) -> None:
    """Kill by user id if the run has its own, else the tree below `root`, from the second process on.

    With bubblewrap the second process is the first of its own pid namespace: when it dies, the kernel kills all
    others, and only after that does bubblewrap itself end. So its end proves that no process is left.
    """
    if prepared.owned_uid is not None:
        _kill_user(prepared.owned_uid)
    if not running:
        return
    victims = [entry.pid for entry in scan() if entry.parent == root] if _wraps(prepared) else []
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    if not victims:
        # Kill the group, not the process, which may be forking: a child that lost its parent before it set its death
        # signal would wait for ever.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(root, signal.SIGKILL)


def _wraps(prepared: PreparedRun) -> bool:
    return prepared.wrapper_processes > 0


def _kill_user(uid: int) -> None:
    """Kill until no process of the user id is left. RLIMIT_NPROC limits their number."""
    deadline_s = time.monotonic() + _REAP_S
    while victims := [entry.pid for entry in scan() if entry.uid == uid]:
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            return
        time.sleep(0.002)
