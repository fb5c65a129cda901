"""Coroutine functions of the actions of one worker: side by side in one process, which none of them can hold for long.

Where a call holds the event loop of that process, the process is left to it: the others are lost attempts, and each
runs again in a process of its own, as a plain function does. So do later calls of the function that held the loop, and
the calls that ran in a process that has died. Belongs to the worker's event loop; `coroutine_server` is the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle

from heddle_dask.isolation.granted import Granted
from heddle_dask.live.worker.coroutine_server import ADOPT, CANCEL, HELD, NUMBER
from heddle_dask.live.worker.process_calls import CALL, FRAME, RAISED, USE, USED, VALUE
from heddle_dask.live.worker.tool_processes import ToolProcess, ToolProcesses, ToolRaised, ToolServerEnded

# A call that is cancelled has so long to end; then its process is killed.
_CANCELLED_S = 2.0
# The process says every second that its loop turns, or which call holds it: one that says nothing is stopped.
SILENT_S = 10
_LOG = logging.getLogger(__name__)


class CallLost(Exception):
    """The process of a call has died, or is left to another call."""


class CoroutineCalls:
    """Runs coroutine functions in processes of the given pool."""

    def __init__(self, processes: ToolProcesses) -> None:
        self._processes = processes
        self._starting = asyncio.Lock()
        self._shared: _SharedProcess | None = None
        self._blocking: set[str] = set()  # functions that have held a loop

    async def run(self, function: str, payload: bytes, offered: dict[str, Any], granted: Granted) -> bytes:
        """Call a pickled (function, args, kwargs) in the common process; returns the pickled value.

        Parameters
        ----------
        function
            Its name, by which another call of it is known.

        Raises
        ------
        ToolRaised
            The function raised.
        CallLost
            It is to run in a process of its own.
        """
        if function in self._blocking:
            raise CallLost
        async with self._starting:
            if self._shared is None or not self._shared.takes_calls():
                try:
                    process = await self._processes.new_for_coroutines()
                except ToolServerEnded:
                    raise CallLost from None
                self._shared = _SharedProcess(self._processes, process, self._note_blocking)
            shared = self._shared
        return await shared.run(function, payload, offered, granted)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.reads.cancel()

    def _note_blocking(self, function: str) -> None:
        self._blocking.add(function)
        _LOG.warning("%s blocks its event loop: it runs in a process of its own from now on", function)


@dataclass(slots=True, eq=False)
class _Call:
    function: str
    granted: Granted
    answer: asyncio.Future[bytes]


class _SharedProcess:
    def __init__(self, processes: ToolProcesses, process: ToolProcess, blocking: Callable[[str], None]) -> None:
        self._processes = processes
        self._process = process
        self._blocking = blocking
        self._numbers = 0
        self._calls: dict[int, _Call] = {}
        self._holder = 0  # the call to which it is left
        self._open = True
        self.reads = asyncio.ensure_future(self._read())

    def takes_calls(self) -> bool:
        """Whether another call may come: it imports from where the worker does, and its loop turns."""
        if self._process.path != tuple(sys.path):
            self._open = False
            self._end_if_useless()
        return self._open

    async def run(self, function: str, payload: bytes, offered: dict[str, Any], granted: Granted) -> bytes:
        self._numbers += 1
        number = self._numbers
        call = self._calls[number] = _Call(function, granted, asyncio.get_running_loop().create_future())
        given = granted.cpus, granted.cores, granted.own_cores, granted.memory_bytes, granted.nice
        try:
            self._send(CALL, number, cloudpickle.dumps((payload, offered, given)))
            return await asyncio.shield(call.answer)
        except asyncio.CancelledError:
            await self._cancel(number, call)
            raise
        finally:
            del self._calls[number]
            self._end_if_useless()

    async def _cancel(self, number: int, call: _Call) -> None:
        """End a call that is not to go on, or its process, where it does not end by itself."""
        try:
            if self._holder != number and not call.answer.done():
                self._send(CANCEL, number)
                await asyncio.wait({call.answer}, timeout=_CANCELLED_S)
        finally:
            if not call.answer.done():
                self._open = False
                await self._processes.end(self._process)

    def _send(self, tag: bytes, number: int, body: bytes = b"") -> None:
        self._process.send(tag, NUMBER.pack(number) + body)

    async def _read(self) -> None:
        """Take what the process says until it ends, or is of no use."""
        silent_s = 0
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            # Counted in seconds that passed one by one: a worker that was suspended itself has heard nothing meanwhile.
            while silent_s < SILENT_S or self._holder:
                try:
                    async with asyncio.timeout(1.0):
                        head = await self._process.reader.readexactly(FRAME.size)
                except TimeoutError:
                    silent_s += 1
                    continue
                silent_s = 0
                tag, length = FRAME.unpack(head)
                body = await self._process.reader.readexactly(length)
                (number,) = NUMBER.unpack_from(body)
                if tag == HELD and number not in self._calls:
                    break
                self._take(tag, number, body[NUMBER.size :])
        self._open = False
        await self._processes.end(self._process)
        self._leave_to(0)

    def _take(self, tag: bytes, number: int, body: bytes) -> None:
        call = self._calls.get(number)
        if call is None:
            return  # it was cancelled; or the loop turns
        if tag == HELD:
            self._blocking(call.function)
            self._leave_to(number)
        elif tag == ADOPT:
            call.granted.adopt(*NUMBER.unpack(body))
        elif tag == USED:
            call.granted.use(*USE.unpack(body))
        elif call.answer.done():
            return  # it runs elsewhere
        elif tag == VALUE:
            call.answer.set_result(body)
        elif tag == RAISED:
            call.answer.set_exception(ToolRaised(*cloudpickle.loads(body)) if body else CallLost())

    def _leave_to(self, holder: int) -> None:
        """Take no more calls; those but this one are lost attempts."""
        self._open = False
        self._holder = holder
        for number, call in self._calls.items():
            if number != holder and not call.answer.done():
                self._send(CANCEL, number)  # should its loop turn again
                call.answer.set_exception(CallLost())

    def _end_if_useless(self) -> None:
        if not self._open and not self._calls:
            self._process.disconnect()  # it ends by this, and the server ends what is below it
