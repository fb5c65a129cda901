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
from collections.abc import Callable
from typing import Any

import cloudpickle

from heddle_dask.isolation import process_tree
from heddle_dask.isolation.cgroups import Cgroup, CgroupTree
from heddle_dask.live.wire.messages import ActionStatus
from heddle_dask.live.worker.printed import Printed
from heddle_dask.live.worker.process_calls import CALL, FRAME, JOIN, LAST_RAISED, LAST_VALUE, PATH, RAISED, USE, USED
from heddle_dask.live.worker.running_call import RunningCall
from heddle_dask.live.worker.tool_fork_server import ENDED, FORK, FORKED, KILL, NOTICE, REQUEST, SERVE

# Plain functions get a process each; so many run at once beside those that have a CPU, the others wait.
MAX_PROCESSES = 64
# The server imports from where the worker does; the environment that tools see stays as it is.
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from heddle_dask.live.worker.tool_fork_server import main; main()"
# Of a stream's buffer: results are read in pieces of this size.
_BUFFER_BYTES = 4 << 20
# A process that has closed its socket has ended, or is about to: its exit status comes within milliseconds.
_STATUS_S = 5.0
# How long cores are held back for a killed process tree that does not end. Nothing of it runs any more.
_KILLED_S = 10.0
# The fork server ends when its socket closes, as soon as it has killed its processes.
_END_S = 5.0


class ToolRaised(Exception):
    """The function raised; the message is one line, `detail` its traceback."""

    def __init__(
        self, message: str, detail: str, cause: ActionStatus = "raised", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.detail = detail
        # `cause`, `retry_after_s`: as in `ActionFinished`: a limit behind it, or the refusal of an API.
        self.cause = cause
        self.retry_after_s = retry_after_s


class ToolProcessEnded(Exception):
    """The process ended in the middle of a call; the message says how."""


class ToolServerEnded(Exception):
    """The fork server ended, and the process of the call with it: any of the calls that ran may be the reason."""

    def __init__(self) -> None:
        super().__init__("the server that forks processes for tools was killed")


class ToolProcess:
    """One process: its number and pid (0 until the server has told), its streams, and where it imports from."""

    def __init__(self, number: int, path: tuple[str, ...], printed: Printed) -> None:
        self.number = number
        self.path = path
        self.printed = printed
        self.pid = 0
        self.cpus = -1  # numeric libraries in it were loaded for so many; -1: it has run nothing
        self.nice = 0  # a lower priority cannot be undone
        self.group: Cgroup | None = None
        self.lasting = True  # whether it may serve another call
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter
        self.connected = False

    async def connect(self, end: socket.socket) -> None:
        self.reader, self.writer = await asyncio.open_connection(sock=end, limit=_BUFFER_BYTES)
        self.connected = True
        self.send(PATH, "\0".join(self.path).encode())
        if self.group is not None:
            self.send(JOIN, "\0".join(self.group.join_files).encode())

    def disconnect(self) -> None:
        if self.connected:
            self.writer.close()

    def send(self, tag: bytes, body: bytes) -> None:
        self.writer.write(FRAME.pack(tag, len(body)))
        self.writer.write(body)

    async def _frame(self) -> tuple[bytes, bytes]:
        tag, length = FRAME.unpack(await self.reader.readexactly(FRAME.size))
        return tag, await self.reader.readexactly(length)

    async def call(self, body: bytes, use: Callable[[int, float], None]) -> bytes:
        """Run one call and return the pickled value; `use` takes what it says that it has used."""
        self.lasting = False
        try:
            self.send(CALL, body)
            await self.writer.drain()
            tag, answer = await self._frame()
            while tag == USED:
                use(*USE.unpack(answer))
                tag, answer = await self._frame()
        except (OSError, asyncio.IncompleteReadError):
            raise await self._how_it_ended() from None
        self.lasting = tag not in (LAST_VALUE, LAST_RAISED)
        if tag in (RAISED, LAST_RAISED):
            raise ToolRaised(*cloudpickle.loads(answer))
        return answer

    async def _how_it_ended(self) -> ToolProcessEnded | ToolServerEnded:
        await asyncio.wait({self.ended}, timeout=_STATUS_S)
        if not self.ended.done():
            return ToolProcessEnded("its process was killed")
        if self.ended.cancelled():
            return ToolServerEnded()
        code = os.waitstatus_to_exitcode(self.ended.result())
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended ({code})"
        return ToolProcessEnded(f"its process {how}")


class ToolProcesses:
    """A pool of processes, forked when they are needed."""

    def __init__(
        self,
        at_once: int = MAX_PROCESSES,  # calls that run at the same time; others wait
        groups: CgroupTree | None = None,  # where each process has a control group; None: nowhere
    ) -> None:
        self._at_once = at_once
        self._free = asyncio.Semaphore(at_once)
        self._groups = groups
        self._idle: list[ToolProcess] = []
        self._processes: dict[int, ToolProcess] = {}
        self._numbers = 0
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def run(self, payload: bytes, offered: dict[str, Any], call: RunningCall | None = None) -> bytes:
        """Call a pickled (function, args, kwargs) in a process; returns the pickled value.

        Whatever the call has started has ended when this returns or raises. A call that is cancelled is killed first,
        with everything below it.

        Parameters
        ----------
        call
            Its terms and limits; takes what it has printed, where it does not return a value.

        Raises
        ------
        ToolRaised
            The function raised.
        ToolProcessEnded
            Its process ended.
        ToolServerEnded
            The fork server ended twice, of which the second one served this call alone.
        LimitExceeded
            It used more than it may.
        """
        try:
            return await self._run(payload, offered, call or RunningCall())
        except ToolServerEnded:
            if self._at_once == 1:
                raise
        alone = ToolProcesses(1, self._groups)
        try:
            return await alone.run(payload, offered, call)
        finally:
            await alone.close()

    async def _run(self, payload: bytes, offered: dict[str, Any], call: RunningCall) -> bytes:
        body = cloudpickle.dumps((payload, offered, call.terms))
        async with self._free:
            process = await self._idle_or_new(call)
            reusable = False
            try:
                process.printed.begin()
                self._confine(process, call)
                value = await process.call(body, call.use)
                reusable = process.lasting and not call.memory_bytes
                return value
            except (ToolRaised, ToolProcessEnded, ToolServerEnded) as error:
                exceeded = call.limit_behind(error)
                reusable = process.lasting and exceeded is None and not call.memory_bytes
                if exceeded is not None:
                    raise exceeded from None
                raise
            finally:
                call.running(None, None, lambda: None)
                if reusable:
                    call.printed = process.printed.end()
                    self._set_idle(process)
                else:
                    # Its cores are free when it has ended with all below it, and not before.
                    await self.end(process)
                    call.printed = process.printed.end()

    def _confine(self, process: ToolProcess, call: RunningCall) -> None:
        process.cpus, process.nice = call.terms.cpus, call.terms.nice
        group = process.group
        if group is not None:
            group.set_cores(call.cores)
            group.set_processes(call.most_processes)
            if call.memory_bytes:
                group.set_memory(call.memory_bytes)
        call.running(lambda: process.pid, group, lambda: self._kill(process))

    def _set_idle(self, process: ToolProcess) -> None:
        self._idle.append(process)  # the one used last is used next: what it has imported is warm
        if len(self._idle) > self._at_once:
            self._discard(self._idle.pop(0))

    def start(self) -> None:
        """Start the fork server, unless it runs. It answers in a fraction of a second; calls wait for it."""
        if self._server is not None and self._server.poll() is None:
            return
        self._server_ended()  # a notice of it may be on its way
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
        asyncio.get_running_loop().add_reader(ours, self._take_notice)

    async def close(self) -> None:
        for process in self._processes.values():
            process.disconnect()
            process.printed.close()
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

    async def _idle_or_new(self, call: RunningCall) -> ToolProcess:
        """A process that has the right imports, and whose numeric libraries know the right number of CPUs.

        A limit of memory is for a new process: what it has allocated before counts too.
        """
        path = tuple(sys.path)
        for at in range(len(self._idle) - 1, -1, -1):
            process = self._idle[at]
            if process.path != path or process.ended.done() or process.reader.at_eof():
                self._discard(self._idle.pop(at))
            elif (process.cpus, process.nice) == (call.terms.cpus, call.terms.nice) and not call.memory_bytes:
                return self._idle.pop(at)
        return await self._new(path)

    async def new_for_coroutines(self) -> ToolProcess:
        """A process for coroutine functions (`coroutine_server`), with no control group: it serves many calls.

        Raises
        ------
        ToolServerEnded
        """
        return await self._new(tuple(sys.path), SERVE)

    async def _new(self, path: tuple[str, ...], kind: bytes = FORK) -> ToolProcess:
        self.start()
        assert self._control is not None
        self._numbers += 1
        process = ToolProcess(self._numbers, path, Printed())
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = [theirs.fileno(), process.printed.write_end]
            try:
                socket.send_fds(self._control, [REQUEST.pack(kind, process.number)], descriptors)
            except OSError:
                raise ToolServerEnded from None  # its end has not been noticed yet
            finally:
                process.printed.close_write_end()
        self._processes[process.number] = process
        try:
            if self._groups is not None and kind == FORK:
                process.group = self._groups.make()
            await process.connect(ours)
        except BaseException:
            self._discard(process)
            raise
        return process

    async def end(self, process: ToolProcess) -> None:
        """Kill a process with everything below it, and wait for its end."""
        self._discard(process)
        await asyncio.wait({process.ended}, timeout=_KILLED_S)

    def _discard(self, process: ToolProcess) -> None:
        process.disconnect()
        self._kill(process)

    def _kill(self, process: ToolProcess) -> None:
        if process.ended.done():
            return
        if process.group is not None:
            with contextlib.suppress(OSError):
                process.group.set_processes(0)  # nothing below it starts another process any more
        if self._control is not None:
            with contextlib.suppress(OSError):  # the server has gone, and its processes with it
                self._control.send(REQUEST.pack(KILL, process.number))

    def _take_notice(self) -> None:
        assert self._control is not None
        try:
            message = self._control.recv(NOTICE.size)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._server_ended()
            return
        kind, number, value = NOTICE.unpack(message)
        if kind == FORKED and number in self._processes:
            self._processes[number].pid = value
        elif kind == ENDED and (process := self._processes.pop(number, None)) is not None:
            self._remove_group(process)
            if not process.ended.done():
                process.ended.set_result(value)

    def _server_ended(self) -> None:
        """The next call starts another server. The kernel kills the processes of this one, but not what is below."""
        self._close_control()
        lost = list(self._processes.values())
        self._processes.clear()
        process_tree.kill_sessions({process.pid for process in lost if process.pid})
        for process in lost:
            self._remove_group(process)
            process.ended.cancel()

    def _remove_group(self, process: ToolProcess) -> None:
        group, process.group = process.group, None
        if group is not None and self._groups is not None:
            if group.pids():
                group.kill()
            self._groups.discard(group)

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
