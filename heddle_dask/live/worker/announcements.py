"""What a worker tells the scheduler by itself, from its start on."""

from __future__ import annotations

import asyncio

from distributed import Worker

from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.codec import Message
from heddle_dask.live.wire.messages import SCHEDULER_EVENT
from heddle_dask.live.wire.transport import send

_AGAIN_S = 1.0


class Announcements:
    """Messages to the scheduler's plugin, held back in their order until it is there.

    It may come with the first rollout only. A scheduler closes the connection of a worker that sends what nothing there
    handles.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._held: list[Message] | None = []  # None: the plugin is there
        self._waits: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Where the plugin is there already, what is sent after this goes at once."""
        try:
            if await dask.event_is_set(self._worker, SCHEDULER_EVENT):
                return self._release()
        except OSError:
            pass  # there is no scheduler yet
        self._waits = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        while True:
            try:
                await dask.event_wait(self._worker, SCHEDULER_EVENT)
                return self._release()
            except OSError:  # the connection broke, and the worker may have another one
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
        """Nobody is waited for any more; what is held back is dropped."""
        if self._waits is not None:
            self._waits.cancel()
