"""The process in which coroutine functions of tools run side by side on one event loop, none on that of the worker.

Forked by `tool_fork_server`; `coroutine_calls` is the other end of its socket. A thread reads what the worker sends and
looks at the loop, so that a coroutine that blocks it is named, and the process ends with its worker all the same.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import cloudpickle

from heddle_dask.isolation.granted import Granted, running_with
from heddle_dask.live.worker.process_calls import (
    CALL,
    FRAME,
    PATH,
    RAISED,
    USE,
    USED,
    VALUE,
    accepted,
    failure_of,
    receive,
)

# From the worker: end a call. To the worker: the loop turns; a call holds it (0: one that is not known); a program was
# started for a call.
CANCEL, TURNS, HELD, ADOPT = b"c", b"t", b"h", b"a"
# The bodies of all frames but `PATH` begin with the number of a call.
NUMBER = struct.Struct("!Q")
LOOK_S = 1.0
HELD_LOOKS = 3
"""Looks in a row to which the loop has not answered: then the call that runs holds it."""

_number: ContextVar[int] = ContextVar("heddle_call", default=0)


def serve_coroutines(calls: socket.socket) -> None:
    """Run calls until the worker's end of the socket closes."""
    asyncio.run(_Server(calls).serve())


class _Server:
    def __init__(self, calls: socket.socket) -> None:
        self._calls = calls
        self._sending = threading.Lock()
        self._tasks: dict[int, asyncio.Task[tuple[bytes, bytes]]] = {}
        # The call for which each task was made, by the call itself too.
        self._made_for: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._answered = True

    async def serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_task_factory(self._make_task)  # type: ignore[arg-type]  # asyncio gives options by name
        threading.Thread(target=self._read, name="heddle-calls", daemon=True).start()
        await self._loop.create_future()  # the thread ends the process

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        self._made_for[task] = _number.get()
        return task

    # -- the thread ----------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            held, look_s = 0, time.monotonic()
            while True:
                ready, _, _ = select.select([self._calls], [], [], max(0.0, look_s - time.monotonic()))
                if time.monotonic() >= look_s:
                    held, look_s = self._look(held), time.monotonic() + LOOK_S
                if ready:
                    frame = receive(self._calls)
                    if frame is None:
                        break
                    self._take(*frame)
        except OSError:
            pass  # the worker has gone
        finally:
            os._exit(0)

    def _take(self, tag: bytes, body: bytes) -> None:
        if tag == PATH:
            sys.path[:] = body.decode().split("\0")
            return
        (number,) = NUMBER.unpack_from(body)
        do: Callable[..., None] = self._begin if tag == CALL else self._cancel
        self._loop.call_soon_threadsafe(do, number, body[NUMBER.size :])

    def _look(self, held: int) -> int:
        if self._answered:
            self._answered = False
            self._loop.call_soon_threadsafe(self._answer)
            self._send(TURNS, 0)
            return 0
        if held + 1 == HELD_LOOKS:
            task = asyncio.current_task(self._loop)
            self._send(HELD, 0 if task is None else self._made_for.get(task, 0))
        return held + 1

    # -- the loop ------------------------------------------------------------------------------------

    def _answer(self) -> None:
        self._answered = True

    def _begin(self, number: int, body: bytes) -> None:
        _number.set(number)  # in the context of this callback, which the task copies
        self._tasks[number] = task = asyncio.ensure_future(self._run(number, body))
        task.add_done_callback(lambda _: self._ended(number))

    def _cancel(self, number: int, _: bytes) -> None:
        if number in self._tasks:
            self._tasks[number].cancel()

    async def _run(self, number: int, body: bytes) -> tuple[bytes, bytes]:
        try:
            payload, offered, given = cloudpickle.loads(body)
            function, args, kwargs = cloudpickle.loads(payload)
            granted = replace(
                Granted(*given),
                adopt=lambda pid: self._send(ADOPT, number, NUMBER.pack(pid)),
                use=lambda tokens, cost: self._send(USED, number, USE.pack(tokens, cost)),
            )
            with running_with(granted):
                value = await function(*args, **{**kwargs, **accepted(function, offered)})
            return VALUE, cloudpickle.dumps(value)
        except BaseException as error:  # SystemExit too: a tool does not end the process that others use
            return RAISED, cloudpickle.dumps(failure_of(error))

    def _ended(self, number: int) -> None:
        task = self._tasks.pop(number)
        # A task that was cancelled before it began has no result; the worker does not look at it.
        tag, answer = (RAISED, b"") if task.cancelled() else task.result()
        self._send(tag, number, answer)

    def _send(self, tag: bytes, number: int, body: bytes = b"") -> None:
        """Send a frame, from any thread; the worker reads at once."""
        with self._sending:
            self._calls.sendall(FRAME.pack(tag, NUMBER.size + len(body)) + NUMBER.pack(number))
            self._calls.sendall(body)
