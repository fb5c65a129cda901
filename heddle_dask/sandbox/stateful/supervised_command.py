"""One command of a sandbox on its machine: from its start below a supervisor to the end of its last process."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

from heddle_dask.isolation.granted import granted
from heddle_dask.sandbox.confinement import DiskUsage, PreparedRun
from heddle_dask.sandbox.process_accounting import Allowed, ProcessAccounting, until_over
from heddle_dask.sandbox.stateful import supervisor
from heddle_dask.sandbox.stateful.contract import EndedBy, ExecResult, SandboxFailed, SandboxSpec

_CHUNK_BYTES = 1 << 16


class KeptOutput:
    """Takes all bytes of a stream and keeps at most `most_bytes` of them.

    Attributes
    ----------
    head
        The first bytes: half of the limit.
    left_out
        Bytes between the beginning and the end that are not kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self.head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._most_head = most_bytes // 2
        self._most_tail = most_bytes - self._most_head
        self.left_out = 0

    def take(self, chunk: bytes) -> None:
        """Add bytes at the end."""
        room = self._most_head - len(self.head)
        self.head += chunk[:room]
        rest = chunk[room:] if room < len(chunk) else b""
        if rest:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
        while self._tail_bytes > self._most_tail:
            first = self._tail.popleft()
            cut = min(len(first), self._tail_bytes - self._most_tail)
            self.left_out += cut
            self._tail_bytes -= cut
            if cut < len(first):
                self._tail.appendleft(first[cut:])

    async def read_from(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(_CHUNK_BYTES):
            self.take(chunk)

    @property
    def text(self) -> str:
        """What is kept, with a line in place of the rest."""
        tail = b"".join(self._tail)
        if not self.left_out:
            return (bytes(self.head) + tail).decode("utf-8", "replace")
        gap = f"\n[... {self.left_out:,} bytes left out ...]\n"
        return bytes(self.head).decode("utf-8", "replace") + gap + tail.decode("utf-8", "replace")


# The kernel ends killed processes within milliseconds; a process in a system call that cannot be interrupted may not.
_END_S = 10.0


class SupervisedCommand:
    """A command that runs. Make it with `start`, and always `end` it."""

    def __init__(
        self, process: asyncio.subprocess.Process, status: int, prepared: PreparedRun, spec: SandboxSpec
    ) -> None:
        self._process = process
        self._status = status
        self._exit_code: int | None = None
        self._prepared = prepared
        self._spec = spec
        self._started_s = time.monotonic()
        self._outputs = (KeptOutput(spec.output_bytes), KeptOutput(spec.output_bytes))
        assert process.stdout is not None and process.stderr is not None
        streams = (process.stdout, process.stderr)
        self._reading = [
            asyncio.ensure_future(output.read_from(stream))
            for output, stream in zip(self._outputs, streams, strict=True)
        ]

    @classmethod
    async def start(
        cls, prepared: PreparedRun, spec: SandboxSpec, cores: Sequence[int], *, outlives: bool = False
    ) -> SupervisedCommand:
        """Start a command.

        Parameters
        ----------
        outlives
            Whether it lives on after the action that starts it: that one cannot hold it to its limits then.
        """
        reading, writing = os.pipe()
        order = {
            "argv": list(prepared.argv),
            "environment": dict(prepared.environment),
            "folder": prepared.folder,
            "cores": list(cores),
            "limits": dict(prepared.rlimits),
            "status": writing,
        }
        try:
            process = await asyncio.create_subprocess_exec(
                getattr(sys, "_base_executable", sys.executable),
                *("-I", "-S", "-B", "-c", supervisor.source()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(writing, *prepared.pass_fds),
                env={"LANG": "C.UTF-8"},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            os.close(reading)
            raise SandboxFailed(f"sandbox: no process for its command: {error.strerror}") from error
        except asyncio.CancelledError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        command = cls(process, reading, prepared, spec)
        given = granted()
        if given is not None and not outlives:
            given.adopt(process.pid)  # it has no order yet: all that it starts is held too
        assert process.stdin is not None
        process.stdin.write(marshal.dumps(order))
        return command

    @property
    def pid(self) -> int:
        """Of the supervisor; the command and all its processes are below it."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the command has ended with all its processes."""
        return self._process.returncode is not None

    async def until_end(
        self,
        timeout_s: float,
        accounting: ProcessAccounting,
        disk: Callable[[], DiskUsage],
        allowed: DiskUsage,
    ) -> ExecResult:
        """Wait for its end, or end it at a limit; `allowed`: what the files may take."""
        watch = asyncio.ensure_future(
            until_over(
                lambda: accounting.tree_usage(self.pid),
                self._prepared.wrapper_processes + 1,  # the supervisor
                Allowed(self._spec.max_processes, self._spec.memory_bytes, allowed),
                lambda _: disk(),
            )
        )
        exited = asyncio.ensure_future(self._process.wait())
        ended_by: EndedBy = ""
        try:
            done, _ = await asyncio.wait({watch, exited}, timeout=timeout_s, return_when="FIRST_COMPLETED")
            if exited not in done:
                ended_by = watch.result() if watch in done else "timeout"
        finally:
            watch.cancel()
            exited.cancel()
            await self.end()
        return ExecResult(
            exit_code=128 + signal.SIGKILL if ended_by or self._exit_code is None else self._exit_code,
            stdout=self._outputs[0].text,
            stderr=self._outputs[1].text,
            seconds=time.monotonic() - self._started_s,
            ended_by=ended_by,
        )

    async def end(self) -> None:
        """Kill all that is left of it and read the rest of its outputs; a second call does nothing."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # the supervisor kills everything, and ends
        try:
            await asyncio.wait_for(asyncio.shield(self._ended()), _END_S)
        except TimeoutError:
            pass
        finally:
            if not self.ended:
                for pid in (*supervisor.below(self.pid), self.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                for task in self._reading:
                    task.cancel()
            self._read_status()

    async def _ended(self) -> None:
        await self._process.wait()
        await asyncio.gather(*self._reading, return_exceptions=True)

    def _read_status(self) -> None:
        """Read the exit code, which the supervisor has written before it ended, if it has."""
        if self._status >= 0:
            os.set_blocking(self._status, False)
            with contextlib.suppress(BlockingIOError):
                code = os.read(self._status, 16)
                self._exit_code = int(code) if code else None
            os.close(self._status)
            self._status = -1

    # -- services ----------------------------------------------------------------------------------

    def freeze(self) -> None:
        stopped: set[int] = set()
        while fresh := [pid for pid in supervisor.below(self.pid) if pid not in stopped]:
            for pid in fresh:
                stopped.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)

    def thaw(self, cores: Sequence[int]) -> None:
        """Let its processes go on, on these cores."""
        for pid in supervisor.below(self.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if cores:
                    os.sched_setaffinity(pid, cores)
                os.kill(pid, signal.SIGCONT)
