"""What a worker tells the scheduler by itself, from its start on."""

from __future__ import annotations

import asyncio
import contextlib

from distributed import Worker

from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.codec import Message
from heddle_dask.live.wire.messages import SCHEDULER_EVENT
from heddle_dask.live.wire.transport import send

_AGAIN_S = 1.0


class Announcements:
    """Messages to the scheduler's plugin, held back in order until it is there: with the first rollout perhaps.

    Dask closes the connection of a worker that sends what nothing in the scheduler handles.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._held: list[Message] | None = []  # None: the plugin is there
        self._waits: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Where the plugin is there already, what is sent after this goes at once."""
        with contextlib.suppress(OSError):  # there is no scheduler yet
            if await dask.event_is_set(self._worker, SCHEDULER_EVENT):
                return self._release()
        self._waits = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        while self._held is not None:
            with contextlib.suppress(OSError):  # the connection broke, and the worker may have another one
                await dask.event_is_set(self._worker, SCHEDULER_EVENT, wait=True)
                return self._release()
            await asyncio.sleep(_AGAIN_S)

    def _release(self) -> None:
        held, self._held = self._held, None
        for message in held or ():
            send(self._worker, message)

    def send(self, message: Message) -> None:
        """Send it, now or when there is somebody to take it."""
        if self._held is None:
            send(self._worker, message)
        else:
            self._held.append(message)

    def close(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
