"""The one controller of a cluster while rollouts run there, and the sessions that share it.

A failure of one session ends that session: the others go on without it. What the controller itself raises ends all of
them, since nobody steers any more; Dask would log it and go on.
"""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from heddle_dask.core import events as ev
from heddle_dask.core.commands import Command, DeployEngines, PlanDegrees, ReportApi
from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import FIRST_RUN, EngineId, RunId
from heddle_dask.core.journal_codec import encode
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.core.run_names import plain, run_of_item
from heddle_dask.core.transitions import WeightsState
from heddle_dask.core.view import StrategySet
from heddle_dask.live.scheduler.journal_spool import JournalSpool
from heddle_dask.live.scheduler.session import Session
from heddle_dask.live.scheduler.snapshot_feed import WatchedSession
from heddle_dask.live.wire.driver_messages import DeclaredService
from heddle_dask.strategies.described import strategies_of_description
from heddle_dask.views.history.lanes import RunTotals
from heddle_dask.views.history.run_shares import RunShare

F = TypeVar("F", bound=Callable[..., None])


def steering(hook: F) -> F:
    """Do nothing once the controller has failed, and let its failure end all sessions."""

    @functools.wraps(hook)
    def wrapped(self: ClusterControl, *args: Any, **kwargs: Any) -> None:
        if self.failure is not None or not self.open_sessions:
            return
        try:
            hook(self, *args, **kwargs)
        except Exception:
            self.latch(traceback.format_exc())

    return wrapped  # type: ignore[return-value]


class ClusterControl:
    """The controller, its clock and its sessions."""

    def __init__(self, name: str, strategies: StrategySet, retries: RetryPolicy) -> None:
        self.name = name  # id of the session with which it began
        self.controller = Controller(strategies, retries, strategies_of_description)
        # Traceback of what the controller raised. Once set, it commands nothing any more.
        self.failure: str | None = None
        # What a person sees of it; None when nothing is kept for that.
        self.watched: WatchedSession | None = None
        self._sessions: dict[RunId, Session] = {}
        self._gone: dict[RunId, Session] = {}
        # Model services that sessions have declared, as their hosts are told of them, by name.
        self.services: dict[str, Mapping[str, Any]] = {}
        self._joined = 0
        self._spool = JournalSpool()
        self._started_s = time.monotonic()
        self._now_s = 0.0
        self._plans_degrees: Session | None = None

    def now(self, at_least_s: float = 0.0) -> float:
        """Seconds since the controller began, or `at_least_s` if that is more; never goes back."""
        self._now_s = max(self._now_s, at_least_s, time.monotonic() - self._started_s)
        return self._now_s

    @property
    def open_sessions(self) -> list[Session]:
        """The sessions that are open, in the order in which they joined."""
        return list(self._sessions.values())

    @property
    def session_ids(self) -> list[str]:
        """Ids of the open sessions, in the order in which they joined."""
        return [session.session_id for session in self._sessions.values()]

    def check_services(self, declared: Iterable[DeclaredService]) -> None:
        """Refuse a model service whose name another run has given to another model."""
        for each in declared:
            name = each.facts.name
            if self.services.get(name, each.spec) != each.spec:
                raise BadInput(
                    f"service {name}: another run on this cluster has declared it differently: give yours another name"
                )

    def next_run(self) -> RunId:
        self._joined += 1
        return FIRST_RUN if self._joined == 1 else RunId(str(self._joined))

    def join(self, session: Session) -> None:
        """A session joins; one that is not the first gets what has happened so far for its journal."""
        if self._spool.rows:
            session.join(self._spool.history())
        self._sessions[session.run.run_id] = session
        self.feed(ev.RunStarted(self.now(), session.run))

    def leave(self, session: Session) -> None:
        """A session has come to its end, has failed, or its driver is gone."""
        run_id = session.run.run_id
        if run_id not in self._sessions:
            return
        if len(self._sessions) > 1 and self.failure is None:
            self.feed(ev.RunEnded(self.now(), run_id))
        del self._sessions[run_id]
        self._gone[run_id] = session
        if not self._sessions:
            self.close()

    def leave_others_alone(self, session: Session) -> None:
        """A session that has failed leaves if there are others; alone, it stays until its driver has heard of it."""
        if len(self._sessions) > 1:
            self.leave(session)

    def leave_failed(self) -> None:
        """Sessions that have failed leave: another one is about to join."""
        for session in self.open_sessions:
            if session.failure is not None or session.closed:
                self.leave(session)

    def close(self) -> None:
        """The last session has ended."""
        self._spool.close()
        if self.watched is not None:
            self.watched.close()

    def latch(self, failure: str) -> None:
        """The controller has failed: all sessions have."""
        if self.failure is None:
            self.failure = failure
        for session in self._sessions.values():
            session.latch(failure)

    def feed(self, event: ev.Event) -> None:
        """Hand an event, in qualified names, to the controller and have its commands carried out."""
        if self.failure is not None:
            return
        try:
            commands = self.controller.handle(event)
        except Exception:
            self.latch(traceback.format_exc())
            raise
        if self.watched is not None:
            self.watched.take(event, commands)
        row = [encode(event), [encode(command) for command in commands]]
        self._spool.append(row)
        for session in self._sessions.values():
            session.journal(row)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        """Have the session carry out what concerns it; what concerns the cluster, any one that is open."""
        if isinstance(command, ReportApi):
            for each in self.open_sessions:
                each.carry_out(command)
            return
        run_id = run_of_item(command)
        if run_id is not None:
            session = self._sessions.get(run_id) or self._gone.get(run_id)
        elif isinstance(command, PlanDegrees | DeployEngines):
            session = self._plans_degrees
        else:
            session = next(iter(self._sessions.values()), None)
        if session is not None:
            session.carry_out(plain(command))

    def plan_degrees(self, session: Session, event: ev.DegreesRequested | ev.DegreesPlanned) -> None:
        """A session has engines planned; the commands that follow are its own."""
        self._plans_degrees = session
        self.feed(event)

    # -- what happens on the cluster ---------------------------------------------------------------

    @steering
    def tell(self, event: ev.Event) -> None:
        """Something has happened on the cluster; the event is stamped with the time."""
        self.feed(self._stamped(event))

    @steering
    def tell_loss(self, event: ev.EngineLost | ev.HostLost) -> None:
        """A worker, or its engine on purpose, is gone: what it ran is held again, before the controller decides."""
        reclaimed = [(session, session.reclaim_stranded()) for session in self._sessions.values()]
        self.feed(self._stamped(event))
        for session, keys in reclaimed:
            session.return_unawaited(keys)

    @steering
    def tell_drivers_too(self, event: ev.EngineLost | ev.WeightsInstalled) -> None:
        """An engine is gone, and its worker is not; or it samples with other weights, or could not load them."""
        self._notify(event)
        self.feed(self._stamped(event))

    @steering
    def weights_fetched(self, event: ev.WeightsFetched) -> None:
        """An engine has weights at hand, or could not get them."""
        self.feed(self._stamped(event))
        engine = self.controller.state.engines.get(event.engine_id)
        if event.cause and engine is not None and engine.weights.state is WeightsState.FAILED:
            self._notify(event)

    @steering
    def engine_draining(self, engine_id: EngineId, ends_in_s: float) -> None:
        """The worker of an engine is about to leave."""
        now_s = self.now()
        self.feed(ev.EngineDraining(now_s, engine_id, now_s + ends_in_s))

    @steering
    def time_reached(self, at_s: float) -> None:
        """A time has come for which the controller had asked; a timer may be early by the resolution of its clock."""
        self.feed(ev.TimeReached(self.now(at_least_s=at_s)))

    def _stamped(self, event: ev.Event) -> ev.Event:
        return replace(event, at=self.now())

    def _notify(self, event: ev.EngineLost | ev.WeightsFetched | ev.WeightsInstalled) -> None:
        for session in self._sessions.values():
            session.notify(event)

    def shares(self) -> tuple[RunShare, ...]:
        """What views show of the open sessions."""
        records = self.controller.state.runs
        sessions = [(each, records[run_id]) for run_id, each in self._sessions.items() if run_id in records]
        seen = {} if self.watched is None else self.watched.history.runs
        shares = []
        for session, record in sessions:
            totals = seen.get(session.run.run_id) or RunTotals()
            shares.append(
                RunShare(
                    session.session_id,
                    session.run.strategy,
                    session.run.weight,
                    record.alive,
                    len(record.unadmitted),
                    record.held,
                    record.sampled_tokens,
                    session.run.run_id,
                    session.name,
                    session.environment,
                    totals.submitted,
                    dict(totals.ended),
                    totals.rewards.view(),
                )
            )
        return tuple(shares)

    def stop(self, reason: str) -> None:
        """End all sessions for a reason (one line) that their drivers are told."""
        for session in self.open_sessions:
            session.stop(reason)
