"""Coroutines that a worker runs beside the handling of its messages."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from tornado.ioloop import IOLoop

from heddle_dask.live.wire.transport import Failed, guarded


class BackgroundTasks:
    """Runs coroutines on a worker's event loop; what one raises is a fault that is told.

    Dask handles no other message of the scheduler before the handler of one is done.
    """

    def __init__(self, loop: IOLoop, failed: Failed) -> None:
        self._loop = loop
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, coroutine: Coroutine[Any, Any, None], session: str = "") -> None:
        """Run a coroutine soon, for a session or for none; from any thread."""
        self._loop.add_callback(self._begin, coroutine, session)

    def _begin(self, coroutine: Coroutine[Any, Any, None], session: str) -> None:
        task = asyncio.ensure_future(self._run(coroutine, session))
        # The loop itself would let go of a task that nothing else refers to.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, coroutine: Coroutine[Any, Any, None], session: str) -> None:
        with guarded(getattr(coroutine, "__qualname__", "a task"), session, self._failed):
            await coroutine
