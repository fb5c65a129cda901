"""The driver's ear: one long poll to the scheduler plugin brings notices, journal lines, counts and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from distributed import Client

from heddle_dask.core.errors import HeddleError
from heddle_dask.live.wire import _dask_internals as dask

# The longest silence: counts for the progress line and journal lines come at least this often.
POLL_S = 0.25
# The longest wait for the answer to the last question, when the scheduler may be gone.
_LAST_ANSWER_S = 2 * POLL_S


class ControlPlaneFailed(HeddleError):
    """The scheduler plugin failed or is gone; the message holds its story."""


class ControlChannel:
    """Polls until closed. `failed` is set, once, when the control plane cannot go on."""

    def __init__(
        self,
        client: Client,
        session: str,
        on_notice: Callable[[list[Any]], None],
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
                updates = await dask.call_scheduler(
                    self._client, "heddle_updates", session=self._session, wait_s=POLL_S
                )
            except (OSError, RuntimeError) as error:
                self._fail(f"the scheduler does not answer: {error}")
                return
            self.take(updates)

    async def refresh(self) -> None:
        """Hear what there is now, without waiting for news."""
        if not self.failed.done():
            self.take(
                await dask.call_scheduler(self._client, "heddle_updates", session=self._session, wait_s=0.0)
            )

    def take(self, updates: Mapping[str, Any]) -> None:
        """Hand out what one answer of the scheduler holds."""
        if updates.get("journal"):
            self._on_journal(updates["journal"])
        for notice in updates.get("notices", ()):
            self._on_notice(notice)
        self.counts = updates.get("counts", self.counts)
        if updates.get("failure"):
            self._fail(f"the scheduler plugin failed and stopped steering:\n{updates['failure']}")

    def _fail(self, story: str) -> None:
        if not self.failed.done():
            self.failed.set_exception(ControlPlaneFailed(story))

    def stop(self) -> None:
        """Ask nothing after the question that is open: its answer holds lines that nobody will tell again."""
        self._stopped = True

    async def close(self) -> None:
        """Stop polling; hears the answer to the open question, where one comes."""
        self.stop()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_LAST_ANSWER_S)
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.failed.done():
            self.failed.exception()  # seen by whoever asked; do not warn about it again
        else:
            self.failed.cancel()
