"""Calls of a user's code that may block, away from the event loop, on a thread that keeps no process alive."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class UserThread:
    """Runs calls one after the other on one thread.

    Threads of `asyncio.to_thread` and of executors are joined when the interpreter ends: a call that hangs would keep
    the process alive. This one is left where it is.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def call(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Call it after the calls before; what it returns or raises reaches the running loop.

        A future that is cancelled gives up the result, and not the call.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def answer(value: T | None, error: BaseException | None) -> None:
            if result.cancelled():
                return
            if error is None:
                result.set_result(value)  # type: ignore[arg-type]
            else:
                result.set_exception(error)

        def run() -> None:
            value, error = None, None
            try:
                value = function(*args)
            except BaseException as raised:
                # A future takes no StopIteration.
                error = RuntimeError("StopIteration") if isinstance(raised, StopIteration) else raised
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the result not wanted
                loop.call_soon_threadsafe(answer, value, error)

        self._calls.put(run)
        return result

    def end(self) -> None:
        """End the thread after the calls before."""
        self._calls.put(None)

    def _work(self) -> None:
        while (run := self._calls.get()) is not None:
            run()


async def on_own_thread(function: Callable[..., T], *args: Any) -> T:
    """The result of one call."""
    thread = UserThread(getattr(function, "__name__", "user"))
    try:
        return await thread.call(function, *args)
    finally:
        thread.end()
