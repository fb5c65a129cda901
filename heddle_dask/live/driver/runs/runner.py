"""The driver: takes attempts from a feed, runs their programs, and delivers one record for each.

A program that raises, is stopped, or loses its engine never ends the run. Only a failure of the control plane, the
journal or the store does.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, assert_never

from distributed import Client

from heddle_dask.core.commands import AdmitTrajectory, CancelTrajectory, GiveUpAction, GiveUpStep
from heddle_dask.core.events import EngineLost, WeightsFetched, WeightsInstalled
from heddle_dask.core.run_description import STALE
from heddle_dask.live.driver.connection.control_channel import ControlChannel
from heddle_dask.live.driver.connection.submission import RESULT_LOST
from heddle_dask.live.driver.programs.attempts import Attempt
from heddle_dask.live.driver.programs.branch import Services
from heddle_dask.live.driver.runs.announcer import Announcer
from heddle_dask.live.driver.runs.endings import EnvironmentFailures
from heddle_dask.live.driver.runs.program_runs import EndedAttempt, ProgramRuns
from heddle_dask.live.wire.driver_messages import (
    ActionPayloadWantedNotice,
    ActionResultLostNotice,
    ApiNotice,
    Notice,
    ProgressNotice,
    StepResultLostNotice,
)
from heddle_dask.live.wire.messages import action_key, step_key
from heddle_dask.records.trajectory import Cause, TrajectoryRecord

if TYPE_CHECKING:
    from heddle_dask.live.driver.files.run_writer import RunWriter

# How often a feed is asked again when nothing has ended: engines may have joined.
_ASK_AGAIN_S = 0.5
_SUFFIX = re.compile(r"(~\d+)?(#\d+)*$")


class AttemptFeed(Protocol):
    """Where the attempts of a run come from."""

    @property
    def is_exhausted(self) -> bool:
        """Whether no attempt will follow."""

    def pull(self) -> Sequence[Attempt]:
        """The attempts to start now; asked after every end and admission. The feed decides how much room there is."""

    def ended(self, ended: EndedAttempt) -> None:
        """An attempt has ended, and is stored."""

    def discarded(self, name: str, tokens: int) -> None:
        """The step of an attempt that was cancelled had sampled these tokens; known after the attempt has ended."""


class ListFeed:
    """Attempts that are all known and all start at once; implements `AttemptFeed`."""

    def __init__(self, attempts: Sequence[Attempt]) -> None:
        self._attempts = attempts

    @property
    def is_exhausted(self) -> bool:
        return not self._attempts

    def pull(self) -> Sequence[Attempt]:
        attempts, self._attempts = self._attempts, ()
        return attempts

    def ended(self, ended: EndedAttempt) -> None:
        """Nothing follows from it."""

    def discarded(self, name: str, tokens: int) -> None:
        """Nothing follows from it."""


class Driver:
    """Runs attempts through one session."""

    def __init__(
        self,
        client: Client,
        services: Services,
        writer: RunWriter | None,
        # Its `failed` becomes done with an exception when the control plane has failed.
        channel: ControlChannel,
        # Of each group, as many as are rewarded together where an environment rewards groups; None: all. With a
        # number, actions whose machines were lost are failures of the environment.
        members: int | None = None,
        # Takes one line for each thing that the user should know.
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._services = services
        self._writer = writer
        self._channel = channel
        self._members = members
        self._admission = Announcer(client, services.session, channel, self.look_again)
        self.failures = EnvironmentFailures(services.retries, note)  # failures of environments
        self._runs = ProgramRuns(client, services, self._admission, self.failures, retry_lost_tools=members is not None)
        self._tasks: dict[str, asyncio.Task[EndedAttempt]] = {}
        self._names: dict[asyncio.Future[Any], str] = {}
        # Tasks that have ended, the failure of the control plane, and None: look whether there is room.
        self._inbox: asyncio.Queue[asyncio.Future[Any] | None] = asyncio.Queue()
        self._to_resume = False
        self._begun = False
        self.ended = asyncio.Event()
        self.finished = 0
        self.unfinished = 0

    @property
    def live_tokens(self) -> int:
        """Tokens generated so far, unfinished trajectories included."""
        return self._runs.live_tokens

    @property
    def waiting(self) -> int:
        """Trajectories that are announced and not admitted."""
        return self._admission.waiting

    @property
    def is_interrupted(self) -> bool:
        """Whether the run is ending early."""
        return self._runs.interrupted

    def on_notice(self, notice: Notice) -> None:
        """Take one notice of the scheduler plugin."""
        submitter, session = self._services.submitter, self._services.session
        match notice:
            case AdmitTrajectory(trajectory_id):
                self._admission.admit(trajectory_id)
            case GiveUpStep(step_id, cause):
                submitter.interrupt(step_key(session, step_id), "given-up", cause)
            case GiveUpAction(action_id, cause):
                submitter.interrupt(action_key(session, action_id), "given-up", cause)
            case StepResultLostNotice(step_id):
                submitter.interrupt(step_key(session, step_id), "result-lost", RESULT_LOST)
            case ActionResultLostNotice(action_id):
                submitter.interrupt(action_key(session, action_id), "result-lost", RESULT_LOST)
            case ActionPayloadWantedNotice(action_id, address):
                submitter.send_payload(action_id, address)
            case CancelTrajectory(trajectory_id, cause):
                self.cancel(trajectory_id, "stale" if cause == STALE else "redundant")
            case EngineLost() | ApiNotice() | ProgressNotice() | WeightsFetched() | WeightsInstalled():
                pass  # its steps report by themselves; the calls of an API wait
            case _:
                assert_never(notice)

    def look_again(self) -> None:
        """There may be room for further attempts."""
        self._inbox.put_nowait(None)

    def interrupt(self, to_resume: bool = False) -> None:
        """Stop admitting and abort what runs; every trajectory still yields its record.

        Parameters
        ----------
        to_resume
            Aborted trajectories are not stored: a resumed run goes on with them from their journalled steps.
        """
        self._runs.interrupted = True
        self._to_resume = to_resume
        if self._begun:
            self._cancel_running()

    def cancel(self, trajectory_id: str, cause: Cause) -> None:
        """End this trajectory now: its step, its tools and its sandboxes; its record says why."""
        # In a fresh environment, and in a branch, it is another one for the scheduler.
        name = trajectory_id if trajectory_id in self._tasks else _attempt_of(trajectory_id)
        task = self._tasks.get(name)
        if task is not None and not task.done():
            self._runs.cancel(name, cause)
            task.cancel()

    def limit_run(self, on_limit: Callable[[str], None]) -> asyncio.TimerHandle:
        """Interrupt the run, and say so, when it has taken as long as its budget allows; cancel it at the run's end."""
        most_s = self._services.budget.max_run_s
        limit_s = math.inf if most_s is None else most_s

        def end() -> None:
            on_limit(f"the run has reached its limit of {limit_s:g} s: it ends, and can be resumed")
            self.interrupt(to_resume=True)

        return asyncio.get_running_loop().call_later(limit_s, end)

    async def run(self, feed: AttemptFeed) -> AsyncIterator[TrajectoryRecord]:
        """Run the attempts of a feed; yields each record when it is journalled, in order of completion.

        Raises
        ------
        ControlPlaneFailed
            The scheduler plugin failed, or the cluster is lost. Records yielded before are safe.
        """
        failed = self._channel.failed
        failed.add_done_callback(self._inbox.put_nowait)
        self._services.submitter.on_discarded = lambda trajectory_id, tokens: feed.discarded(
            _attempt_of(trajectory_id), tokens
        )
        try:
            await self._start(feed.pull())
            while self._tasks or not (feed.is_exhausted or self.is_interrupted):
                first = await self._next()
                if first is failed:
                    await failed
                if first is not None:
                    record = self._keep(first.result(), feed)
                    self._tasks.pop(self._names.pop(first))
                    yield record
                if not self.is_interrupted:
                    await self._start(feed.pull())
        finally:
            failed.remove_done_callback(self._inbox.put_nowait)
            await self._cancel_all()
            self.ended.set()

    async def _next(self) -> asyncio.Future[Any] | None:
        try:
            async with asyncio.timeout(_ASK_AGAIN_S):
                return await self._inbox.get()
        except TimeoutError:
            return None

    async def _start(self, attempts: Sequence[Attempt]) -> None:
        if not attempts:
            return
        self.unfinished += len(attempts)
        self._runs.expect(attempts, self._members)
        self._admission.expect(attempts)
        for attempt in attempts:
            task = asyncio.create_task(self._runs.run(attempt), name=attempt.name)
            self._tasks[attempt.name] = task
            self._names[task] = attempt.name
            task.add_done_callback(self._inbox.put_nowait)
        # A task that is cancelled before its first step never runs at all, and would yield no record.
        await asyncio.sleep(0)
        self._begun = True
        if self.is_interrupted:
            self._cancel_running()
        await self._admission.announce(attempts)

    def _cancel_running(self) -> None:
        self._runs.interrupt()
        for task in self._tasks.values():
            task.cancel()

    async def _cancel_all(self) -> None:
        self._cancel_running()
        running = list(self._tasks.values())
        if running:
            await asyncio.wait(running)
            for task in running:
                task.exception()  # `run` raises the failure of the control plane; these follow from it
            self._tasks.clear()
            self._names.clear()

    def _keep(self, ended: EndedAttempt, feed: AttemptFeed) -> TrajectoryRecord:
        self.finished += 1
        self.unfinished -= 1
        if self._writer is not None and self.stores(ended.record):
            self._writer.finish(ended.record)
        feed.ended(ended)
        return ended.record

    def stores(self, record: TrajectoryRecord) -> bool:
        """Whether a record of this run goes to its store, if there is one."""
        return self._writer is not None and not self.is_left_to_resume(record)

    def is_left_to_resume(self, record: TrajectoryRecord) -> bool:
        """Whether a resumed run will go on with this trajectory."""
        return self._to_resume and record.status == "aborted" and record.cause == "user"


def _attempt_of(trajectory_id: str) -> str:
    """The name of the attempt of which this is a branch, or an attempt in a fresh environment."""
    return _SUFFIX.sub("", trajectory_id)


def notice_line(notice: Notice) -> str:
    """One line for the user; empty where a notice says nothing to him."""
    match notice:
        case EngineLost():
            return f"engine {notice.engine_id} is lost: {notice.reason}"
        case ApiNotice(state="open"):
            return f"api {notice.api}: circuit breaker open for {notice.seconds:.1f} s: {notice.cause}"
        case ApiNotice():
            return f"api {notice.api}: circuit breaker {notice.state}: calls go on"
        case ProgressNotice(line):
            return line
        case _:
            return ""


def progress_of(driver: Driver | None) -> dict[str, int]:
    """Trajectories that have and have not ended, and tokens generated; zeros before the first batch."""
    if driver is None:
        return dict.fromkeys(("finished", "unfinished", "tokens"), 0)
    return {"finished": driver.finished, "unfinished": driver.unfinished, "tokens": driver.live_tokens}
