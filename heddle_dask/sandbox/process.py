"""Runs one confined program from start to the death of its last process, on the event loop.

Reads at most the allowed output, watches wall clock, processes, memory and disk, and on every way out
(end, limit, cancellation, error) kills whatever is left before it returns.
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

from heddle_dask.sandbox.census import Census, proportional_bytes, scan
from heddle_dask.sandbox.confinement import Cell
from heddle_dask.sandbox.limits import SandboxLimits
from heddle_dask.sandbox.outcome import Cause, RawRun

# Ceiling for what should take milliseconds: the kernel clearing away killed processes.
_REAP_S = 10.0
_FIRST_LOOK_S = 0.1
_LONGEST_LOOK_S = 0.5


async def run_confined(cell: Cell, order: Mapping[str, Any], limits: SandboxLimits, census: Census) -> RawRun:
    """Start the cell's program, give it its order, and wait until nothing of it is left.

    Raises
    ------
    OSError
        The program could not be started at all.
    """
    started_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *cell.argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=dict(cell.environment),
        cwd=cell.folder or "/",
        pass_fds=cell.pass_fds,
        start_new_session=True,
    )
    assert process.stdout is not None
    output = _Output(limits.output_bytes)
    reader = asyncio.create_task(output.read_from(process.stdout))
    feed = asyncio.create_task(_feed(process, marshal.dumps(dict(order))))
    exit_seen = asyncio.create_task(_exit_of(process.pid))
    watch = asyncio.create_task(_watch(cell, process.pid, limits, census))
    over = asyncio.create_task(output.over.wait())
    try:
        deadline_s = started_s + limits.wall_s
        stopped_for = await _until_end(exit_seen, watch, over, deadline_s)
    finally:
        # Both the kill and the removal below are handed to a thread before anything is awaited.
        for helper in (feed, exit_seen, watch, over):
            helper.cancel()
        await _leave_nothing(process, cell)
        await asyncio.wait([reader], timeout=_REAP_S)
        reader.cancel()
    if output.over.is_set() and not stopped_for:
        stopped_for = "output"
    status = process.returncode if process.returncode is not None else -int(signal.SIGKILL)
    return RawRun(
        output=bytes(output.kept),
        exit_status=status if status >= 0 else 128 - status,
        stopped_for=stopped_for,
        seconds=time.monotonic() - started_s,
    )


class _Output:
    """Keeps the first bytes of a stream and tells when there are more."""

    def __init__(self, most_bytes: int) -> None:
        self.kept = bytearray()
        self.over = asyncio.Event()
        self._most_bytes = most_bytes

    async def read_from(self, stream: asyncio.StreamReader) -> None:
        """Read to the end of the stream. What is too much is dropped until the writer is killed."""
        while chunk := await stream.read(65536):
            room = self._most_bytes - len(self.kept)
            self.kept += chunk[:room]
            if len(chunk) > room:
                self.over.set()


async def _until_end(
    exit_seen: asyncio.Task[Any],
    watch: asyncio.Task[Any],
    over: asyncio.Task[Any],
    deadline_s: float,
) -> Cause:
    """Wait for the program's exit or the first limit that it breaks; says which."""
    done, _ = await asyncio.wait(
        [exit_seen, watch, over],
        timeout=max(0.0, deadline_s - time.monotonic()),
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


async def _feed(process: asyncio.subprocess.Process, payload: bytes) -> None:
    assert process.stdin is not None
    # A program that died early closes the pipe; its exit status tells that story, not this error.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(payload)
        await process.stdin.drain()
        process.stdin.close()


async def _exit_of(pid: int) -> None:
    """Return when the process has exited, whoever still holds its pipes open."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    exited = loop.create_future()

    def report() -> None:
        if not exited.done():
            exited.set_result(None)

    loop.add_reader(handle, report)
    try:
        await exited
    finally:
        loop.remove_reader(handle)
        os.close(handle)


async def _watch(cell: Cell, root: int, limits: SandboxLimits, census: Census) -> Cause:
    """Return the limit that the run breaks as a whole; looks less often the longer it runs."""
    pause_s = _FIRST_LOOK_S
    while True:
        await asyncio.sleep(pause_s)
        pause_s = min(_LONGEST_LOOK_S, pause_s * 1.5)
        usage = await census.usage(cell, root)
        if usage.threads - cell.wrapper_processes > limits.processes:
            return "processes"
        if usage.resident_bytes > limits.memory_bytes:
            exact_bytes = await asyncio.to_thread(proportional_bytes, usage.pids)
            if (usage.resident_bytes if exact_bytes is None else exact_bytes) > limits.memory_bytes:
                return "memory"
        if cell.used_disk_bytes is not None:
            used_bytes = await asyncio.to_thread(cell.used_disk_bytes)
            if used_bytes > limits.disk_bytes:
                return "files"


async def _leave_nothing(process: asyncio.subprocess.Process, cell: Cell) -> None:
    """Kill every process of the run and wait until the first one is reaped."""
    await asyncio.to_thread(_kill_all, process.pid, process.returncode is None, cell)
    try:
        await asyncio.wait_for(process.wait(), _REAP_S)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _kill_all(root: int, running: bool, cell: Cell) -> None:
    """Kill by user id where the run owns one, else the tree below `root`, from the second process on.

    With bubblewrap the second process is the first of its own pid namespace: when it dies the kernel
    kills all others, and only when they are gone does bubblewrap itself end. That order makes its
    end the proof that nothing is left.
    """
    if cell.owned_uid is not None:
        _kill_user(cell.owned_uid)
    if not running:
        return
    victims = [entry.pid for entry in scan() if entry.parent == root] if _wraps(cell) else []
    for victim in victims or [root]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def _wraps(cell: Cell) -> bool:
    return cell.wrapper_processes > 0


def _kill_user(uid: int) -> None:
    """Kill until no process of the user id is left. RLIMIT_NPROC bounds how many there can be."""
    deadline_s = time.monotonic() + _REAP_S
    while victims := [entry.pid for entry in scan() if entry.uid == uid]:
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            return
        time.sleep(0.002)
