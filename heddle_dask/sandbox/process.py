"""Runs one confined program on the event loop, from its start to the end of its last process.

Reads at most the allowed output, watches wall clock, processes, memory and disk, and in every case (end, limit,
cancellation, error) kills all remaining processes before it returns.

Not `asyncio.create_subprocess_exec`, for two reasons: on Python 3.11 it uses one waiting thread per child, and its
`wait` returns only after every holder of the pipes has closed them. Both block the loop for one to two milliseconds
per start.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from heddle_dask.isolation.granted import Granted, granted
from heddle_dask.sandbox.confinement import DiskUsage, PreparedRun
from heddle_dask.sandbox.inside import READY
from heddle_dask.sandbox.outcome import Cause, RawRun, SandboxLimits
from heddle_dask.sandbox.process_accounting import Allowed, Pace, ProcessAccounting, scan, until_over

_CHUNK_BYTES = 65536


class Child:
    """A started process. Make it in the thread of the event loop, and always `close` it.

    The kernel's parent-death signal, which ends the child when this process dies, is tied to the starting thread.

    Attributes
    ----------
    pid
        Process id; also the id of its session and process group.
    output
        The first bytes of its standard output and standard error.
    output_over
        Set when it has written more than is kept.
    output_ended
        Set when no process has its output open any longer.
    exited
        Set when it has exited and is reaped.
    """

    def __init__(self, prepared: PreparedRun, payload: bytes, most_output_bytes: int) -> None:
        self.output = bytearray()
        self.output_over = asyncio.Event()
        self.output_ended = asyncio.Event()
        self.exited = asyncio.Event()
        self._most_output_bytes = most_output_bytes
        self._left = memoryview(payload)
        self._ready = False
        self._loop = asyncio.get_running_loop()
        given = granted() or Granted()
        with given.starting():
            self._process = subprocess.Popen(
                prepared.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(prepared.environment),
                cwd=prepared.folder,
                pass_fds=prepared.pass_fds,
                start_new_session=True,
                bufsize=0,
            )
        given.adopt(self._process.pid)
        assert self._process.stdin is not None and self._process.stdout is not None
        self.pid = self._process.pid
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        try:
            # An own child that is not reaped before `_on_exit`: its pid cannot have been reused.
            self._handle = os.pidfd_open(self.pid)
        except OSError:  # no descriptors left, or a kernel before 5.3; the child has no order yet
            self._process.kill()
            self._process.communicate()
            raise
        for stream in (self._stdin, self._stdout):
            os.set_blocking(stream.fileno(), False)
        self._loop.add_reader(self._handle, self._on_exit)
        self._loop.add_reader(self._stdout.fileno(), self._on_readable)

    @property
    def exit_status(self) -> int | None:
        """Exit status as in a shell, 128 + n after signal n; None while the process runs."""
        status = self._process.returncode
        return status if status is None or status >= 0 else 128 - status

    def close(self) -> None:
        """Close all descriptors. Does not kill the process."""
        self._close_stdin()
        self._close_stdout()
        if self._handle >= 0:
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
            self._handle = -1
        self._process.poll()

    def _on_exit(self) -> None:
        self._process.wait()  # returns at once: the process has exited
        self._loop.remove_reader(self._handle)
        self.exited.set()

    def _on_readable(self) -> None:
        try:
            chunk = os.read(self._stdout.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._close_stdout()
            return
        if not self._ready and chunk.startswith(READY):
            chunk = chunk[len(READY) :]
            self._loop.add_writer(self._stdin.fileno(), self._on_writable)
        self._ready = True  # without the ready byte a wrapper failed, and this is its message
        room = self._most_output_bytes - len(self.output)
        self.output += chunk[:room]
        if len(chunk) > room:  # excess output is dropped until the writer is killed
            self.output_over.set()

    def _on_writable(self) -> None:
        # A child that died early closes the pipe; its exit status reports that, not this error.
        with contextlib.suppress(BlockingIOError):
            try:
                self._left = self._left[os.write(self._stdin.fileno(), self._left) :]
            except BrokenPipeError:
                self._left = self._left[:0]
        if not self._left:
            self._close_stdin()

    def _close_stdin(self) -> None:
        if not self._stdin.closed:
            self._loop.remove_writer(self._stdin.fileno())
            self._stdin.close()

    def _close_stdout(self) -> None:
        if not self._stdout.closed:
            self._loop.remove_reader(self._stdout.fileno())
            self._stdout.close()
        self.output_ended.set()


# Upper limit for the kernel to clean up killed processes, which usually takes milliseconds.
_REAP_S = 10.0


async def run_confined(
    prepared: PreparedRun, order: Mapping[str, Any], limits: SandboxLimits, accounting: ProcessAccounting
) -> RawRun:
    """Start the prepared program, send its order, and wait until all its processes have ended."""
    started_s = time.monotonic()
    child = Child(prepared, marshal.dumps(dict(order)), limits.output_bytes)
    exit_seen = asyncio.create_task(child.exited.wait())
    watch = asyncio.create_task(_watch(prepared, child.pid, limits, accounting))
    over = asyncio.create_task(child.output_over.wait())
    tasks: tuple[asyncio.Task[Any], ...] = (exit_seen, watch, over)
    try:
        done, _ = await asyncio.wait(tasks, timeout=limits.wall_s, return_when=asyncio.FIRST_COMPLETED)
        stopped_for: Cause = "timeout"
        if over in done:
            stopped_for = "output"
        elif exit_seen in done:
            stopped_for = ""
        elif watch in done:
            stopped_for = watch.result()
    finally:
        for task in tasks:
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


async def _watch(prepared: PreparedRun, root: int, limits: SandboxLimits, accounting: ProcessAccounting) -> Cause:
    own = prepared.wrapper_processes
    over = await until_over(
        lambda: accounting.usage(prepared, root),
        lambda: own,
        Allowed(limits.processes, limits.memory_bytes, DiskUsage(limits.disk_bytes, limits.files)),
        prepared.disk_usage,
        Pace(),
    )
    return "files" if over == "disk" else over


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
    victims = [entry.pid for entry in scan() if entry.parent == root] if prepared.wrapper_processes else []
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    if not victims:
        # Kill the group, not the process, which may be forking: a child that lost its parent before it set its death
        # signal would wait for ever.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(root, signal.SIGKILL)


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
