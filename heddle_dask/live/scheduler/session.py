"""One rollout session as the scheduler holds it: a controller, a clock, and what the driver must hear.

A session outlives single runs: its controller, and what strategies have learnt, stay from `open` to `close`.
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
from heddle_dask.core.ids import ActionId, StepId, TrajectoryId
from heddle_dask.core.journal_codec import encode
from heddle_dask.live.scheduler.predictions import Predictions
from heddle_dask.live.wire.messages import ACTION_PREFIX, Key

# A driver fetches the journal several times a second; one that has stopped must not fill the scheduler.
JOURNAL_LINES_KEPT = 200_000
# Words that are on their way when the driver closes the session are here after milliseconds.
LAST_WORD_S = 1.0


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
        Story of the first exception in a hook. Once set, no command is issued any more.
    """

    def __init__(self, session_id: str, client_id: str, controller: Controller) -> None:
        self.session_id = session_id
        self.client_id = client_id
        self.controller = controller
        self.held: dict[Key, None] = {}
        self.failure: str | None = None
        self.predictions: Predictions | None = None
        self.degrees: Closes | None = None
        self._started_s = time.monotonic()
        self._now_s = 0.0
        self._journal: list[list[Any]] = []
        self._notices: list[list[Any]] = []
        self._news = asyncio.Event()

    def predict(self, trajectory_id: TrajectoryId) -> None:
        """Have the remaining work of a trajectory predicted."""
        if self.predictions is not None:
            self.predictions.ask(self.controller.state.trajectories[trajectory_id])

    def close(self) -> None:
        """Stop what runs beside the scheduler, and answer the driver's open question."""
        self._news.set()
        for beside in (self.predictions, self.degrees):
            if beside is not None:
                beside.close()

    def now(self) -> float:
        """Seconds since the session began; never goes back."""
        self._now_s = max(self._now_s, time.monotonic() - self._started_s)
        return self._now_s

    def handle(self, event: Event) -> list[Command]:
        """Hand the event to the controller and journal it with its commands."""
        commands = self.controller.handle(event)
        if len(self._journal) < JOURNAL_LINES_KEPT:
            self._journal.append([encode(event), [encode(command) for command in commands]])
        return commands

    def notify(self, kind: str, *fields: Any) -> None:
        """Tell the driver, as soon as it asks: it waits in `updates`."""
        self._notices.append([kind, *fields])
        self._news.set()

    def latch(self, story: str) -> None:
        """Keep the first failure of a hook and raise it at the client."""
        if self.failure is None:
            self.failure = story
            self._news.set()

    async def updates(self, wait_s: float) -> Mapping[str, Any]:
        """Everything new for the driver; waits up to `wait_s` for a notice."""
        if not self._news.is_set() and wait_s > 0:
            # Nothing to say is an answer too: it carries the journal and the counts.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), wait_s)
        self._news.clear()
        notices, self._notices = self._notices, []
        journal, self._journal = self._journal, []
        return {
            "notices": notices,
            "journal": journal,
            "failure": self.failure,
            "counts": self.counts(),
        }

    async def come_to_rest(self) -> None:
        """Wait until every trajectory has ended and its actions have reported, `LAST_WORD_S` at most.

        Results reach the driver before the scheduler hears of them, so that the driver may be done first.
        """
        deadline_s = time.monotonic() + LAST_WORD_S
        while self.controller.state.trajectories and self.failure is None and time.monotonic() < deadline_s:
            await asyncio.sleep(0.002)

    def counts(self) -> Mapping[str, Any]:
        """How many trajectories are in which state, and how full the engines are."""
        return self.controller.snapshot().counts()

    def return_unawaited(self, keys: Iterable[Key]) -> None:
        """Tell the driver of held tasks that the controller will never command: their results are lost.

        The worker of such a step or action died after it had ended. The driver asks again, if it has no result.
        """
        for key in keys:
            if key in self.held and not self._awaits(key):
                del self.held[key]
                self.notify("result-lost", list(key))

    def _awaits(self, key: Key) -> bool:
        kind, _, name, step_index, attempt = key
        if kind == ACTION_PREFIX:
            return self.controller.awaits_action(ActionId(name))
        return self.controller.awaits(StepId(TrajectoryId(name), step_index, attempt))
