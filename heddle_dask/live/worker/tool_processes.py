"""The processes in which a tool worker runs plain functions: each can be killed, and is used again if it was not.

Belongs to the worker's event loop; `tool_fork_server` is the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import cloudpickle

from heddle_dask.live.worker.tool_fork_server import (
    CALL,
    ENDED,
    FORK,
    FRAME,
    KILL,
    PATH,
    REQUEST,
    VALUE,
)

# Plain functions get a process each; this many run at once, the others wait.
MAX_PROCESSES = 64
# The server imports from where the worker does; the environment that tools see stays as it is.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from heddle_dask.live.worker.tool_fork_server import main; main()"
)
# Of a stream's buffer: results are read in pieces of this size.
_BUFFER_BYTES = 4 << 20
# A process that has closed its socket has ended, or is about to: its exit status comes within milliseconds.
_STATUS_S = 5.0
# The fork server ends when its socket closes, as soon as it has killed its processes.
_END_S = 5.0


class ToolRaised(Exception):
    """The function raised; the message is one line, `detail` its traceback."""

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message)
        self.detail = detail


class ToolProcessEnded(Exception):
    """The process ended in the middle of a call; the message says how."""


class _Process:
    """One process: its number, its streams, and the path from which it imports."""

    def __init__(self, number: int, path: tuple[str, ...]) -> None:
        self.number = number
        self.path = path
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter
        self.connected = False

    async def connect(self, end: socket.socket) -> None:
        self.reader, self.writer = await asyncio.open_connection(sock=end, limit=_BUFFER_BYTES)
        self.connected = True
        self._send(PATH, "\0".join(self.path).encode())

    def disconnect(self) -> None:
        if self.connected:
            self.writer.close()

    def _send(self, tag: bytes, body: bytes) -> None:
        self.writer.write(FRAME.pack(tag, len(body)))
        self.writer.write(body)

    async def call(self, body: bytes) -> bytes:
        """Run one call and return the pickled value."""
        try:
            self._send(CALL, body)
            await self.writer.drain()
            tag, length = FRAME.unpack(await self.reader.readexactly(FRAME.size))
            answer = await self.reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError):
            raise ToolProcessEnded(await self._how_it_ended()) from None
        if tag != VALUE:
            raise ToolRaised(*cloudpickle.loads(answer))
        return answer

    async def _how_it_ended(self) -> str:
        await asyncio.wait({self.ended}, timeout=_STATUS_S)
        if not self.ended.done() or self.ended.cancelled():
            return "its process was killed"
        code = os.waitstatus_to_exitcode(self.ended.result())
        return (
            f"its process was killed by {_signal_name(-code)}" if code < 0 else f"its process ended ({code})"
        )


class ToolProcesses:
    """A pool of processes, forked when they are needed."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MAX_PROCESSES)
        self._idle: list[_Process] = []
        self._processes: dict[int, _Process] = {}
        self._numbers = 0
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def run(self, payload: bytes, offered: dict[str, Any]) -> bytes:
        """Call a pickled (function, args, kwargs) in a process; returns the pickled value.

        A call that is cancelled is killed, with all that it has started in its process group.

        Raises
        ------
        ToolRaised
            The function raised.
        ToolProcessEnded
            Its process ended.
        """
        body = cloudpickle.dumps((payload, offered))
        async with self._free:
            process = await self._idle_or_new()
            reusable = False
            try:
                value = await process.call(body)
                reusable = True
                return value
            except ToolRaised:
                reusable = True
                raise
            finally:
                if reusable:
                    self._idle.append(process)  # the one used last is used next: what it has imported is warm
                else:
                    self._discard(process)

    def start(self) -> None:
        """Start the fork server, unless it runs. It answers in a fraction of a second; calls wait for it."""
        if self._server is not None and self._server.poll() is None:
            return
        self._close_control()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Ctrl-C at the terminal is for the worker, which then decides.
                start_new_session=True,
            )
        ours.setblocking(False)
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._take_ended)

    async def close(self) -> None:
        """End the fork server and all processes."""
        for process in self._processes.values():
            process.disconnect()
        self._processes.clear()
        self._idle.clear()
        self._close_control()
        server, self._server = self._server, None
        if server is not None:
            try:
                await asyncio.to_thread(server.wait, _END_S)
            except subprocess.TimeoutExpired:
                server.kill()  # its processes have PDEATHSIG
                await asyncio.to_thread(server.wait)

    async def _idle_or_new(self) -> _Process:
        path = tuple(sys.path)
        while self._idle:
            process = self._idle.pop()
            if process.path == path and not process.ended.done() and not process.reader.at_eof():
                return process
            self._discard(process)
        self.start()
        assert self._control is not None
        self._numbers += 1
        process = _Process(self._numbers, path)
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [REQUEST.pack(FORK, process.number)], [theirs.fileno()])
        self._processes[process.number] = process
        try:
            await process.connect(ours)
        except BaseException:
            self._discard(process)
            raise
        return process

    def _discard(self, process: _Process) -> None:
        process.disconnect()
        if self._control is not None and not process.ended.done():
            with contextlib.suppress(OSError):  # the server has gone, and its processes with it
                self._control.send(REQUEST.pack(KILL, process.number))

    def _take_ended(self) -> None:
        assert self._control is not None
        try:
            message = self._control.recv(ENDED.size)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            # The server has gone: the next call starts another one. Its processes get SIGKILL.
            self._close_control()
            for process in self._processes.values():
                process.ended.cancel()
            self._processes.clear()
            return
        number, status = ENDED.unpack(message)
        ended = self._processes.pop(number, None)
        if ended is not None and not ended.ended.done():
            ended.ended.set_result(status)

    def _close_control(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            asyncio.get_running_loop().remove_reader(control)
            control.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
