"""One command of a sandbox on its machine: from its start below a supervisor to the end of its last process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import marshal
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from types import CodeType
from typing import Any

from heddle_dask.core.resources import IDLE_NICE
from heddle_dask.isolation.granted import granted
from heddle_dask.sandbox.confinement import PreparedRun, compiled
from heddle_dask.sandbox.stateful import forwarder, supervisor
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


@functools.cache
def _forwarder() -> CodeType:
    return compile(forwarder.source(), "<forwarder>", "exec")


# The kernel ends killed processes within milliseconds; a process in a system call that cannot be interrupted may not.
_END_S = 10.0


class SupervisedCommand:
    """A command that runs. Make it with `start`, and always `end` it.

    Attributes
    ----------
    own_threads
        Of the supervisor and of the confinement, which do not count.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, status: asyncio.StreamReader, own_threads: int, output_bytes: int
    ) -> None:
        self._process = process
        self.own_threads = own_threads
        self._exit_code: int | None = None
        self._over: asyncio.Future[EndedBy] = asyncio.get_running_loop().create_future()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._started_s = time.monotonic()
        self._outputs = (KeptOutput(output_bytes), KeptOutput(output_bytes))
        assert process.stdout is not None and process.stderr is not None
        streams = (process.stdout, process.stderr)
        self._reading = [
            asyncio.ensure_future(output.read_from(stream))
            for output, stream in zip(self._outputs, streams, strict=True)
        ]
        self._reading.append(asyncio.ensure_future(self._read_status(status)))

    @classmethod
    async def start(
        cls, prepared: PreparedRun, spec: SandboxSpec, cores: Sequence[int], *, service: bool = False
    ) -> SupervisedCommand:
        """Start a command.

        Parameters
        ----------
        service
            Whether it is one: it is stopped before its first instruction, and lives on after the action that starts it,
            which cannot hold it to its limits therefore.
        """
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                getattr(sys, "_base_executable", sys.executable),
                *("-I", "-S", "-B", "-c", compiled(supervisor.source())),
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
            raise SandboxFailed(f"sandbox: no process could be started: {error.strerror}") from error
        finally:
            os.close(writing)
        status = asyncio.StreamReader()
        pipe = os.fdopen(reading, "rb", 0)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(status), pipe)
        command = cls(process, status, prepared.wrapper_processes + 1 + bool(prepared.gateway), spec.output_bytes)
        given = None if service else granted()
        if given is not None:
            given.adopt(process.pid)  # it has no order yet: all that it starts is held too
        order = marshal.dumps(
            {
                "argv": list(prepared.argv),
                "environment": dict(prepared.environment),
                "folder": prepared.folder,
                "cores": list(cores),
                # Without a CPU of its own, too, it uses what the others leave.
                "nice": 0 if given is None else given.nice or (0 if given.cpus else IDLE_NICE - 1),
                "limits": dict(prepared.rlimits),
                "status": writing,
                "frozen": service,
                "calls_filter": prepared.calls_filter,
                "gateway": prepared.gateway,
                "forwarder": _forwarder() if prepared.gateway else None,
            }
        )
        assert process.stdin is not None
        process.stdin.write(len(order).to_bytes(4, "big") + order)
        if service and not await command._answered("frozen"):
            await command.end()
            raise SandboxFailed("sandbox: a service did not start")
        return command

    @property
    def pid(self) -> int:
        """Of the supervisor; the command and all its processes are below it."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the command has ended with all its processes."""
        return self._process.returncode is not None

    @property
    def to_stop(self) -> bool:
        """Whether its sandbox has exceeded a limit."""
        return self._over.done()

    async def until_end(self, timeout_s: float) -> ExecResult:
        """Wait for its end, or end it at its time or a limit (`stop_for`)."""
        exited = asyncio.ensure_future(self._process.wait())
        ended_by: EndedBy = ""
        try:
            waits: set[asyncio.Future[Any]] = {self._over, exited}
            await asyncio.wait(waits, timeout=timeout_s, return_when="FIRST_COMPLETED")
            if not exited.done():
                ended_by = self._over.result() if self._over.done() else "timeout"
        finally:
            exited.cancel()
            await self.end()
        return ExecResult(
            exit_code=128 + signal.SIGKILL if ended_by or self._exit_code is None else self._exit_code,
            stdout=self._outputs[0].text,
            stderr=self._outputs[1].text,
            seconds=time.monotonic() - self._started_s,
            ended_by=ended_by,
        )

    def stop_for(self, limit: EndedBy) -> None:
        """Let `until_end` end it, because its sandbox exceeds a limit."""
        if not self._over.done():
            self._over.set_result(limit)

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
                for pid in (*supervisor.states_below(self.pid), self.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                for task in self._reading:
                    task.cancel()

    async def _ended(self) -> None:
        await self._process.wait()
        await asyncio.gather(*self._reading, return_exceptions=True)

    async def _read_status(self, status: asyncio.StreamReader) -> None:
        async for line in status:
            word, _, code = line.decode().strip().partition(" ")
            if word == "exit":
                self._exit_code = int(code)
            else:
                self._answers.put_nowait(word)
        self._answers.put_nowait("")

    # -- services ----------------------------------------------------------------------------------

    async def freeze(self) -> bool:
        """Stop all its processes; False where that cannot be, or it has ended: then it is to be ended."""
        return await self._told("freeze", "frozen")

    async def thaw(self, cores: Sequence[int]) -> bool:
        """Let its processes go on, on these cores; False where it has ended."""
        return await self._told(f"thaw {','.join(map(str, cores))}", "thawed")

    async def _told(self, order: str, answer: str) -> bool:
        assert self._process.stdin is not None
        if self.ended:
            return False
        self._process.stdin.write(order.encode() + b"\n")
        return await self._answered(answer)

    async def _answered(self, expected: str) -> bool:
        try:
            return await asyncio.wait_for(self._answers.get(), _END_S) == expected
        except TimeoutError:
            return False
