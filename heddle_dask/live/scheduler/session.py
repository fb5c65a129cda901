"""One rollout session as the scheduler holds it: its place in the controller, and what is new for the driver.

To the controller a session is a run. It outlives the batches of its rollout: what its strategies have learnt stays from
its start to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from heddle_dask.core.commands import Command
from heddle_dask.core.controller import Controller
from heddle_dask.core.entities import Action, Trajectory
from heddle_dask.core.ids import StepId, TrajectoryId
from heddle_dask.core.journal_codec import gap, of_run
from heddle_dask.core.run_description import RunDescription
from heddle_dask.core.run_names import RunNames
from heddle_dask.live.scheduler.journal_spool import SpoolReader
from heddle_dask.live.scheduler.predictions import Predictions
from heddle_dask.live.wire.driver_messages import ActionResultLostNotice, Notice, StepResultLostNotice, Updates
from heddle_dask.live.wire.messages import Key, named_by

# A driver fetches the journal several times a second; a driver that has stopped must not fill the scheduler's memory.
# One line says how many lines beyond these are missing.
JOURNAL_LINES_KEPT = 200_000
# Reports that are on their way when the driver ends the session arrive within milliseconds.
LAST_REPORTS_S = 1.0


class Session:
    def __init__(
        self,
        session_id: str,
        client_id: str,
        controller: Controller,
        clock: Callable[[], float],
        run: RunDescription,
        silence_s: float = 60.0,
    ) -> None:
        self.session_id = session_id
        self.client_id = client_id
        self.controller = controller
        self.now = clock
        self.silence_s = silence_s  # a worker that is silent for so long is lost
        # `run`, `names`: what the controller knows of it, and the names of its trajectories and actions there.
        self.run = run
        self.names = RunNames(run.run_id)
        self.held: dict[Key, None] = {}  # tasks that wait for a command, by key
        # Traceback of the first exception in a hook. Once set, no command is issued any more.
        self.failure: str | None = None
        self.closed = False  # whether the session has ended: events that are still under way are ignored
        # What ended the session before the driver did, in one line; empty while nothing has.
        self.stopped = ""
        self.predictions: Predictions | None = None
        self.on_close: list[Callable[[], None]] = []  # what else ends with the session; may be called twice
        self.name = self.environment = ""  # for people
        self._history: SpoolReader | None = None
        # Model services that the runs on the cluster have declared, as their hosts are told of them, by name.
        self.services: dict[str, Mapping[str, Any]] = {}
        # Id of the session with which the controller began. Hosts of model services answer to it: a copy outlives the
        # run for which it was loaded.
        self.controller_name = session_id
        # Does what a command says, which is in the names of this session.
        self.carry_out: Callable[[Command], None] = lambda command: None
        # Holds the session's tasks that Dask sent back to "no-worker" because their worker died; returns their keys.
        self.reclaim_stranded: Callable[[], Sequence[Key]] = lambda: ()
        self._journal: list[list[Any]] = []
        self._lines_missing = 0
        self._lines_sent = 0
        self._notices: list[Notice] = []
        self._due = asyncio.Event()

    def predict(self, trajectory_id: TrajectoryId) -> None:
        if self.predictions is not None:
            self.predictions.ask(self.controller.state.trajectories[self.names.of(trajectory_id)])

    def trajectory(self, trajectory_id: str) -> Trajectory | None:
        """The controller's record of a trajectory of this session; None when it has ended."""
        return self.controller.state.trajectories.get(self.names.of(trajectory_id))

    def action(self, action_id: str) -> Action | None:
        """The controller's record of an action of this session; None when it has ended."""
        return self.controller.state.actions.get(self.names.of(action_id))

    def awaits(self, step_id: StepId) -> bool:
        return self.controller.awaits(self.names.of_step(step_id))

    def close(self) -> None:
        """Stop what runs beside the scheduler, and answer the driver's open poll."""
        self.closed = True
        self._due.set()
        if self.predictions is not None:
            self.predictions.close()
        for close in self.on_close:
            close()

    def stop(self, reason: str) -> None:
        """End the session for a reason (one line) that the driver is told."""
        self.stopped = reason
        self.close()

    def join(self, history: SpoolReader) -> None:
        """The session joins a controller that has begun before: its journal begins with all that happened there."""
        self._history = history

    def journal(self, row: list[Any]) -> None:
        """Keep one row of the controller's journal for the driver."""
        if len(self._journal) < JOURNAL_LINES_KEPT:
            self._journal.append(row)
        else:
            self._lines_missing += 1

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
        return self._updates(self._take_history() if self._history is not None else self._take_journal())

    def _updates(self, journal: list[Any]) -> Updates:
        notices, self._notices = self._notices, []
        lines_before = self._lines_sent
        self._lines_sent += len(journal)
        return Updates(tuple(notices), journal, self.counts(), self.failure, self.stopped, lines_before=lines_before)

    def _take_journal(self) -> list[Any]:
        journal, self._journal = self._journal, []
        if self._lines_missing:
            journal.append(gap(self._lines_missing))
            self._lines_missing = 0
        return journal

    def _take_history(self) -> list[Any]:
        """The next part of what happened before the session joined; the last one with what has happened since."""
        history = self._history
        assert history is not None
        rows = [] if history.has_begun else [of_run(self.run.run_id)]
        rows += history.read()
        if not history.ended:
            self._due.set()
            return rows
        self._history = None
        if history.missing:
            rows.append(gap(history.missing))
        return [*rows, *self._take_journal()]

    def last_updates(self) -> Updates:
        journal: list[Any] = []
        while self._history is not None:
            journal += self._take_history()
        return self._updates([*journal, *self._take_journal()])

    async def come_to_rest(self) -> None:
        """Wait until every trajectory has ended and its actions have reported, `LAST_REPORTS_S` at most.

        Results reach the driver before the scheduler has their reports, so the driver may be done first.
        """
        deadline_s = time.monotonic() + LAST_REPORTS_S
        while self._has_trajectories and time.monotonic() < deadline_s:
            if self.failure is not None or self.closed:
                return
            await asyncio.sleep(0.002)

    @property
    def _has_trajectories(self) -> bool:
        of_all = self.controller.state.trajectories
        return any(t.spec.run_id == self.run.run_id for t in of_all.values())

    def counts(self) -> Mapping[str, Any]:
        """How many trajectories are in which state, and how full the engines are."""
        return self.controller.run_counts(self.run.run_id)

    def return_unawaited(self, keys: Iterable[Key]) -> None:
        """Tell the driver of held tasks for which the controller will never issue a command: their results are lost.

        The worker of such a step or action died after it had ended. The driver asks again, if it has no result.
        """
        for key in keys:
            if key not in self.held:
                continue
            named = named_by(key)
            if isinstance(named, StepId):
                if not self.awaits(named):
                    del self.held[key]
                    self.notify(StepResultLostNotice(named))
            elif self.action(named) is None:
                del self.held[key]
                self.notify(ActionResultLostNotice(named))
