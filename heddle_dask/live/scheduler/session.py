"""One rollout session as the scheduler holds it: a controller, a clock, and what is new for the driver.

A session outlives single runs: its controller, and what strategies have learnt, stay from its start to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from heddle_dask.core.commands import Command
from heddle_dask.core.controller import Controller
from heddle_dask.core.events import Event
from heddle_dask.core.ids import StepId, TrajectoryId
from heddle_dask.core.journal_codec import encode, gap
from heddle_dask.live.scheduler.predictions import Predictions
from heddle_dask.live.scheduler.snapshot_feed import WatchedSession
from heddle_dask.live.wire.driver_messages import (
    ActionResultLostNotice,
    Notice,
    StepResultLostNotice,
    Updates,
)
from heddle_dask.live.wire.messages import Key, named_by

# A driver fetches the journal several times a second; a driver that has stopped must not fill the scheduler's memory.
# One line says how many lines beyond these are missing.
JOURNAL_LINES_KEPT = 200_000
# Reports that are on their way when the driver ends the session arrive within milliseconds.
LAST_REPORTS_S = 1.0


class Closes(Protocol):
    """What runs beside the scheduler's event loop for a session."""

    def close(self) -> None:
        """Stop it."""


class Session:
    """State of one session on the scheduler.

    Attributes
    ----------
    held
        Tasks that wait for a command, by key.
    failure
        Traceback of the first exception in a hook. Once set, no command is issued any more.
    closed
        Whether the session has ended: events that are still under way are ignored.
    stopped
        What ended the session before the driver did, in one line; empty while nothing has.
    watched
        What a person sees of the session; None when nothing is kept for that.
    """

    def __init__(self, session_id: str, client_id: str, controller: Controller) -> None:
        self.session_id = session_id
        self.client_id = client_id
        self.controller = controller
        self.held: dict[Key, None] = {}
        self.failure: str | None = None
        self.closed = False
        self.stopped = ""
        self.predictions: Predictions | None = None
        self.degrees: Closes | None = None
        self.watched: WatchedSession | None = None
        self._started_s = time.monotonic()
        self._now_s = 0.0
        self._journal: list[list[Any]] = []
        self._lines_missing = 0
        self._notices: list[Notice] = []
        self._due = asyncio.Event()

    def predict(self, trajectory_id: TrajectoryId) -> None:
        """Have the remaining work of a trajectory predicted."""
        if self.predictions is not None:
            self.predictions.ask(self.controller.state.trajectories[trajectory_id])

    def close(self) -> None:
        """Stop what runs beside the scheduler, and answer the driver's open poll."""
        self.closed = True
        self._due.set()
        for beside in (self.predictions, self.degrees, self.watched):
            if beside is not None:
                beside.close()

    def stop(self, reason: str) -> None:
        """End the session for a reason (one line) that the driver is told."""
        self.stopped = reason
        self.close()

    def now(self) -> float:
        """Seconds since the session began; never goes back."""
        self._now_s = max(self._now_s, time.monotonic() - self._started_s)
        return self._now_s

    def handle(self, event: Event) -> list[Command]:
        """Hand the event to the controller and journal it with its commands."""
        commands = self.controller.handle(event)
        if self.watched is not None:
            self.watched.take(event, commands)
        if len(self._journal) < JOURNAL_LINES_KEPT:
            self._journal.append([encode(event), [encode(command) for command in commands]])
        else:
            self._lines_missing += 1
        return commands

    def notify(self, notice: Notice) -> None:
        """Answer the driver's poll with this notice, now or as soon as it polls."""
        self._notices.append(notice)
        self._due.set()

    def latch(self, failure: str) -> None:
        """Keep the traceback of the first failure of a hook; the driver raises it."""
        if self.failure is None:
            self.failure = failure
            self._due.set()

    async def updates(self, wait_s: float) -> Updates:
        """What is new for the driver; waits up to `wait_s` seconds for a notice."""
        if not self._due.is_set() and wait_s > 0:
            # An answer without a notice is of use too: it carries the journal and the counts.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._due.wait(), wait_s)
        self._due.clear()
        notices, self._notices = self._notices, []
        journal, self._journal = self._journal, []
        if self._lines_missing:
            journal.append(gap(self._lines_missing))
            self._lines_missing = 0
        return Updates(tuple(notices), journal, self.counts(), self.failure, self.stopped)

    async def come_to_rest(self) -> None:
        """Wait until every trajectory has ended and its actions have reported, `LAST_REPORTS_S` at most.

        Results reach the driver before the scheduler has their reports, so the driver may be done first.
        """
        deadline_s = time.monotonic() + LAST_REPORTS_S
        while self.controller.state.trajectories and time.monotonic() < deadline_s:
            if self.failure is not None or self.closed:
                return
            await asyncio.sleep(0.002)

    def counts(self) -> Mapping[str, Any]:
        """How many trajectories are in which state, and how full the engines are."""
        return self.controller.snapshot().counts()

    def return_unawaited(self, keys: Iterable[Key]) -> None:
        """Tell the driver of held tasks for which the controller will never issue a command: their results are lost.

        The worker of such a step or action died after it had ended. The driver asks again, if it has no result.
        """
        for key in keys:
            if key not in self.held:
                continue
            named = named_by(key)
            if isinstance(named, StepId):
                if not self.controller.awaits(named):
                    del self.held[key]
                    self.notify(StepResultLostNotice(named))
            elif not self.controller.awaits_action(named):
                del self.held[key]
                self.notify(ActionResultLostNotice(named))
