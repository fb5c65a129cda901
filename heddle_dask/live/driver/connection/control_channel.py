"""Long-polls the scheduler plugin for notices, journal lines, counts and failures."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from distributed import Client
from distributed.comm import CommClosedError

from heddle_dask.core.errors import HeddleError, WriteFailed
from heddle_dask.core.journal_codec import gap
from heddle_dask.live.driver.options import Patience
from heddle_dask.live.wire._dask_internals import SILENT_S
from heddle_dask.live.wire.driver_messages import FetchUpdates, Notice, ProgressNotice, Updates
from heddle_dask.live.wire.transport import ask_scheduler

# The longest poll: counts for the progress line and journal lines come at least this often.
POLL_S = 0.25
# The longest wait for the answer to the last poll, when the scheduler may be gone.
_LAST_ANSWER_S = 2 * POLL_S
# A wait is counted in these: a process that was suspended itself has not waited all that time for an answer.
_WAIT_S = 1.0

Result = TypeVar("Result")


class ControlPlaneFailed(HeddleError):
    """The run cannot go on: the scheduler plugin failed, and the message holds its traceback, or `ClusterLost`."""


class ClusterLost(ControlPlaneFailed):
    """The cluster runs this session no more; the message is one line.

    What has finished is stored. The run can be resumed, on this cluster or on another one.
    """


async def answered_within(
    limit_s: float, request: Coroutine[Any, Any, Result], tell: Callable[[str], None] = lambda line: None
) -> Result:
    """The answer to a request to the scheduler.

    Parameters
    ----------
    tell
        Takes a line about a silence before the limit, and about its end.

    Raises
    ------
    ClusterLost
        There is no answer in time.
    """
    asking = asyncio.ensure_future(request)
    told = math.ceil(min(SILENT_S, limit_s / 2) / _WAIT_S)
    try:
        for waits in range(1, max(1, math.ceil(limit_s / _WAIT_S)) + 1):
            await asyncio.wait({asking}, timeout=min(_WAIT_S, limit_s))
            if asking.done():
                if waits > told:
                    tell("the scheduler answers again")
                return asking.result()
            if waits == told:
                tell(f"the scheduler has not answered for {waits * _WAIT_S:g} s")
    finally:
        asking.cancel()
    raise ClusterLost(f"the scheduler has not answered for {limit_s:g} s")


class ControlChannel:
    """Polls until closed. `failed` is set, once, when the control plane cannot go on."""

    def __init__(
        self,
        client: Client,
        session: str,
        on_notice: Callable[[Notice], None],
        on_journal: Callable[[list[Any]], None],
        patience: Patience,
    ) -> None:
        self._client = client
        self._silence_s = max(patience.scheduler_s, 2 * POLL_S)
        self._missing = MissingCapacity(patience.rejoin_s)
        self._session = session
        self._on_notice = on_notice
        self._journal = JournalInOrder(on_journal)
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self.counts: Mapping[str, Any] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        self._task = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        while not (self.failed.done() or self._stopped):
            try:
                updates = await answered_within(self._silence_s, self._fetch(POLL_S), self._tell)
            except ClusterLost as error:
                self._fail(error)
                return
            except (OSError, RuntimeError) as error:
                self._fail(ClusterLost(f"the scheduler does not answer: {_one_line(error)}"))
                return
            except Exception as error:  # another version of heddle_dask answers
                self._fail(ControlPlaneFailed(f"the scheduler's answer cannot be read: {error!r}"))
                return
            try:
                self.take(updates)
            except WriteFailed as error:
                self.failed.set_exception(error)
                return
            # A poll that ended without a word would leave the run waiting for ever.
            except Exception as error:
                self._fail(ControlPlaneFailed(f"the scheduler's answer cannot be used: {error!r}"))
                raise

    def _tell(self, line: str) -> None:
        self._on_notice(ProgressNotice(line))

    async def _fetch(self, wait_s: float) -> Updates:
        return await ask_scheduler(self._client, FetchUpdates(self._session, wait_s))

    async def refresh(self) -> None:
        """Fetch the updates that there are now, without waiting for more."""
        if not self.failed.done():
            self.take(await self.unless_failed(self._fetch(0.0)))

    async def unless_failed(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of work that asks the scheduler; the failure of the control plane, if that comes first."""
        working = asyncio.ensure_future(work)
        try:
            either: tuple[asyncio.Future[Any], ...] = (working, self.failed)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await self.failed
            return await working
        finally:
            working.cancel()

    def take(self, updates: Updates) -> None:
        """Hand out the parts of one answer of the scheduler."""
        self._journal.take(updates.journal, updates.lines_before)
        for notice in updates.notices:
            self._on_notice(notice)
        self.counts = updates.counts or self.counts
        if updates.failure:
            told = updates.failure
            story = f"a fault of heddle_dask ended this session: {told}"
            if "\n" in told:
                story = f"the scheduler plugin failed and stopped steering:\n{told}"
            self._fail(ControlPlaneFailed(story))
        lost = updates.stopped or self._missing.too_long(updates.counts, time.monotonic())
        if lost:
            self._fail(ClusterLost(lost))

    def _fail(self, failure: ControlPlaneFailed) -> None:
        if not self.failed.done():
            self.failed.set_exception(failure)

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
        self._journal.close()


def _one_line(error: BaseException) -> str:
    if isinstance(error, CommClosedError):
        return "its connection has closed"
    return " ".join(str(error).split()) or type(error).__name__


class JournalInOrder:
    """Hands out the lines of a session's journal as the scheduler wrote them.

    Two questions may be open at once, and the later answer may come first: its lines wait for those before them.
    """

    def __init__(self, on_lines: Callable[[list[Any]], None]) -> None:
        self._on_lines = on_lines
        self._next = 0
        self._early: dict[int, list[Any]] = {}  # by the number of lines before them

    def take(self, lines: list[Any], lines_before: int) -> None:
        if lines:
            self._early[lines_before] = lines
        while (ready := self._early.pop(self._next, None)) is not None:
            self._next += len(ready)
            self._on_lines(ready)

    def close(self) -> None:
        """No answer comes any more: lines that waited for a lost one are handed out behind a line that says so."""
        for lines_before in sorted(self._early):
            missing = lines_before - self._next
            lines = self._early.pop(lines_before)
            self._next = lines_before + len(lines)
            self._on_lines([gap(missing), *lines] if missing else lines)


class MissingCapacity:
    """Measures how long work has waited without any engine, or without any tool worker.

    Time in which a job that will bring one waits in a queue is not counted: it may be hours, and the work is not lost.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._waited_s: dict[str, float] = {}
        self._seen_s = 0.0

    def too_long(self, counts: Mapping[str, Any], now_s: float) -> str:
        """One line that says what has been missing for too long; empty while nothing has.

        Parameters
        ----------
        counts
            `ClusterSnapshot.counts`, and what is queued; empty: the scheduler knows none.
        """
        if not counts:
            return ""
        since_s, self._seen_s = now_s - self._seen_s, now_s
        steps = counts["queued"] + counts["not_admitted"]
        waiting = {
            "engine": 0 if counts["engines_ready"] else steps,
            "tool worker": 0 if counts["tool_cpus"] else counts["actions_waiting"],
        }
        queued = {
            "engine": counts.get("engines_queued", 0),
            "tool worker": counts.get("tool_workers_queued", 0),
        }
        for kind, waits in waiting.items():
            if not waits:
                self._waited_s.pop(kind, None)
                continue
            before_s = self._waited_s.get(kind)
            counted_s = 0.0 if before_s is None or queued[kind] else since_s
            self._waited_s[kind] = (before_s or 0.0) + counted_s
            if self._waited_s[kind] >= self._limit_s:
                return f"the last {kind} is gone, and none has come back for {self._limit_s:g} s"
        return ""
