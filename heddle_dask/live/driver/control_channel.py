"""Long-polls the scheduler plugin for notices, journal lines, counts and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from distributed import Client

from heddle_dask.core.errors import HeddleError, WriteFailed
from heddle_dask.live.wire.driver_messages import FetchUpdates, Notice, Updates
from heddle_dask.live.wire.transport import ask_scheduler

# The longest poll: counts for the progress line and journal lines come at least this often.
POLL_S = 0.25
# The longest wait for the answer to the last poll, when the scheduler may be gone.
_LAST_ANSWER_S = 2 * POLL_S


class ControlPlaneFailed(HeddleError):
    """The scheduler plugin failed or is gone; the message holds its traceback."""


class ControlChannel:
    """Polls until closed. `failed` is set, once, when the control plane cannot go on."""

    def __init__(
        self,
        client: Client,
        session: str,
        on_notice: Callable[[Notice], None],
        on_journal: Callable[[list[Any]], None],
    ) -> None:
        self._client = client
        self._session = session
        self._on_notice = on_notice
        self._on_journal = on_journal
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self.counts: Mapping[str, Any] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Begin polling."""
        self._task = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        while not (self.failed.done() or self._stopped):
            try:
                updates = await self._fetch(POLL_S)
            except (OSError, RuntimeError) as error:
                self._fail(f"the scheduler does not answer: {error}")
                return
            except Exception as error:  # another version of heddle_dask answers
                self._fail(f"the scheduler's answer cannot be read: {error!r}")
                return
            try:
                self.take(updates)
            except WriteFailed as error:
                self.failed.set_exception(error)
                return
            except (
                Exception
            ) as error:  # a poll that ended without a word would leave the run waiting for ever
                self._fail(f"the scheduler's answer cannot be used: {error!r}")
                raise

    async def _fetch(self, wait_s: float) -> Updates:
        return await ask_scheduler(self._client, FetchUpdates(self._session, wait_s))

    async def refresh(self) -> None:
        """Fetch the updates that there are now, without waiting for more."""
        if not self.failed.done():
            self.take(await self._fetch(0.0))

    def take(self, updates: Updates) -> None:
        """Hand out the parts of one answer of the scheduler."""
        if updates.journal:
            self._on_journal(updates.journal)
        for notice in updates.notices:
            self._on_notice(notice)
        self.counts = updates.counts or self.counts
        if updates.failure:
            self._fail(f"the scheduler plugin failed and stopped steering:\n{updates.failure}")

    def _fail(self, message: str) -> None:
        if not self.failed.done():
            self.failed.set_exception(ControlPlaneFailed(message))

    def stop(self) -> None:
        """Start no further poll. The open one goes on: its answer holds journal lines that are sent only once."""
        self._stopped = True

    async def close(self) -> None:
        """Stop polling; takes the answer to the open poll, where one comes."""
        self.stop()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_LAST_ANSWER_S)
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.failed.done():
            self.failed.exception()  # already raised by the run; asyncio must not warn about it again
        else:
            self.failed.cancel()
