"""Coroutines that a worker runs beside the handling of its messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from tornado.ioloop import IOLoop

_LOG = logging.getLogger(__name__)


class BackgroundTasks:
    """Runs coroutines on a rollout worker's event loop; one that fails is logged.

    Dask handles no other message of the scheduler before the handler of one is done, and closes the worker when it
    raises.
    """

    def __init__(self, loop: IOLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Tasks that have begun and not ended."""
        return len(self._tasks)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine soon; from any thread."""
        self._loop.add_callback(self._begin, coroutine)

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        # The loop itself would let go of a task that nothing else refers to.
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("a task of the rollout worker failed", exc_info=task.exception())
