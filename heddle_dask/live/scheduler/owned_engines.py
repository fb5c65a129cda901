"""Engines that a driver has started on the cluster: ended with its last session, or some time after it has died.

A driver that was killed cannot end its session, and its engines would hold their GPUs for ever. For a while they are
kept: the driver of a resumed run takes them over, and need not load the weights again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

End = Callable[[], Awaitable[None]]


class OwnedEngines:
    def __init__(self, end: End) -> None:
        self._end = end
        self._owner = ""
        self._kept_s = 0.0
        self._ending: asyncio.Task[None] | None = None
        self._end_task: asyncio.Task[None] | None = None
        self.inherited = False  # whether the owner has taken them over from a driver that has died

    def own(self, client_id: str, kept_s: float) -> None:
        """A driver starts engines, or owns those that it found; they are kept so many seconds after its death."""
        self._stop_waiting()
        self._owner, self._kept_s, self.inherited = client_id, kept_s, False

    def release(self) -> None:
        """The engines have ended, or belong to no driver."""
        self._stop_waiting()
        self._owner, self.inherited = "", False

    def end(self) -> None:
        """The engines end now: no session uses them."""
        if self._end_task is None:
            self._end_task = asyncio.create_task(self._end_now())

    async def ended(self) -> None:
        """Return when no engines are ending."""
        while self._end_task is not None:
            await asyncio.wait({self._end_task})

    async def _end_now(self) -> None:
        try:
            await self._end()
        finally:
            self.release()
            self._end_task = None

    def is_owner(self, client_id: str) -> bool:
        return bool(client_id) and self._owner == client_id

    def pass_on(self, client_id: str, other_id: str) -> None:
        """The engines of a client whose run is over belong to another one that uses them."""
        if self.is_owner(client_id):
            self._owner, self.inherited = other_id, False

    def client_joined(self, client_id: str) -> None:
        """A driver begins a session: engines whose owner has died are its own now."""
        if self._ending is not None:
            self._stop_waiting()
            self._owner, self.inherited = client_id, True

    def client_left(self, client_id: str) -> None:
        """A client has gone; if it was the owner, the engines end unless a driver takes them over in time."""
        if self._owner == client_id:
            self._stop_waiting()
            self._ending = asyncio.create_task(self._end_later())

    def close(self) -> None:
        """End nothing any more: the scheduler itself ends."""
        self._stop_waiting()

    async def _end_later(self) -> None:
        await asyncio.sleep(self._kept_s)
        self._owner, self._ending = "", None
        self.end()

    def _stop_waiting(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
