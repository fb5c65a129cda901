"""The one controller of a cluster while rollouts run there, and the sessions that share it.

A failure of one session ends that session: the others go on without it. What the controller itself raises ends all of
them, since nobody steers any more; Dask would log it and go on.
"""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from heddle_dask.core import events as ev
from heddle_dask.core.commands import Command, DeployEngines, PlanDegrees, ReportApi
from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import FIRST_RUN, EngineId, HostId, RunId
from heddle_dask.core.journal_codec import encode
from heddle_dask.core.nouns import EngineDescription, HostDescription
from heddle_dask.core.resources import PoolMaximum
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.core.run_names import plain, run_of_item
from heddle_dask.core.transitions import WeightsState
from heddle_dask.core.view import StrategySet
from heddle_dask.live.scheduler.journal_spool import JournalSpool
from heddle_dask.live.scheduler.snapshot_feed import WatchedSession
from heddle_dask.live.wire.driver_messages import DeclaredService, EngineLostNotice
from heddle_dask.live.wire.training_messages import EngineUpdatedNotice
from heddle_dask.live.wire.weight_messages import WeightsFetchedReport, WeightsInstalledReport
from heddle_dask.strategies.described import strategies_of_description
from heddle_dask.views.history.run_snapshot import RunShare

if TYPE_CHECKING:
    from heddle_dask.live.scheduler.session_events import SessionEvents

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
    """The controller, its clock and its sessions.

    Attributes
    ----------
    name
        Id of the session with which it began.
    failure
        Traceback of what the controller raised. Once set, it commands nothing any more.
    services
        Model services that sessions have declared, as their hosts are told of them, by name.
    watched
        What a person sees of it; None when nothing is kept for that.
    """

    def __init__(self, name: str, strategies: StrategySet, retries: RetryPolicy) -> None:
        self.name = name
        self.controller = Controller(strategies, retries, strategies_of_description)
        self.failure: str | None = None
        self.watched: WatchedSession | None = None
        self._sessions: dict[RunId, SessionEvents] = {}
        self._gone: dict[RunId, SessionEvents] = {}
        self.services: dict[str, Mapping[str, Any]] = {}
        self._joined = 0
        self._spool = JournalSpool()
        self._started_s = time.monotonic()
        self._now_s = 0.0
        self._plans_degrees: SessionEvents | None = None

    def now(self, at_least_s: float = 0.0) -> float:
        """Seconds since the controller began, or `at_least_s` if that is more; never goes back."""
        self._now_s = max(self._now_s, at_least_s, time.monotonic() - self._started_s)
        return self._now_s

    @property
    def open_sessions(self) -> list[SessionEvents]:
        """The sessions that are open, in the order in which they joined."""
        return list(self._sessions.values())

    @property
    def session_ids(self) -> list[str]:
        """Ids of the open sessions, in the order in which they joined."""
        return [events.session.session_id for events in self._sessions.values()]

    def session(self, session_id: str) -> SessionEvents | None:
        """An open session, or one that has left and from which reports may still come; None for another one."""
        for events in (*self._sessions.values(), *self._gone.values()):
            if events.session.session_id == session_id:
                return events
        return None

    def check_services(self, declared: Iterable[DeclaredService]) -> None:
        """Refuse a model service whose name another run has given to another model.

        Raises
        ------
        BadInput
        """
        for each in declared:
            name = each.facts.name
            if self.services.get(name, each.spec) != each.spec:
                raise BadInput(
                    f"service {name}: another run on this cluster has declared it differently: give yours another name"
                )

    def next_run(self) -> RunId:
        """The id of the run that joins next."""
        self._joined += 1
        return FIRST_RUN if self._joined == 1 else RunId(str(self._joined))

    def join(self, events: SessionEvents) -> None:
        """A session joins; one that is not the first gets what has happened so far for its journal."""
        session = events.session
        if self._spool.rows:
            session.join(self._spool.history())
        self._sessions[session.run.run_id] = events
        self.feed(ev.RunStarted(self.now(), session.run))

    def leave(self, events: SessionEvents) -> None:
        """A session has come to its end, has failed, or its driver is gone."""
        run_id = events.session.run.run_id
        if run_id not in self._sessions:
            return
        if len(self._sessions) > 1 and self.failure is None:
            self.feed(ev.RunEnded(self.now(), run_id))
        del self._sessions[run_id]
        self._gone[run_id] = events
        if not self._sessions:
            self.close()

    def leave_others_alone(self, events: SessionEvents) -> None:
        """A session that has failed leaves if there are others; alone, it stays until its driver has heard of it."""
        if len(self._sessions) > 1:
            self.leave(events)

    def leave_failed(self) -> None:
        """Sessions that have failed leave: another one is about to join."""
        for events in self.open_sessions:
            if events.session.failure is not None or events.session.closed:
                self.leave(events)

    def close(self) -> None:
        """The last session has ended."""
        self._spool.close()
        if self.watched is not None:
            self.watched.close()

    def latch(self, failure: str) -> None:
        """The controller has failed: all sessions have."""
        if self.failure is None:
            self.failure = failure
        for events in self._sessions.values():
            events.session.latch(failure)

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
        for events in self._sessions.values():
            events.session.journal(row)
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
            events = self._sessions.get(run_id) or self._gone.get(run_id)
        elif isinstance(command, PlanDegrees | DeployEngines):
            events = self._plans_degrees
        else:
            events = next(iter(self._sessions.values()), None)
        if events is not None:
            events.carry_out(plain(command))

    def plan_degrees(self, events: SessionEvents, event: ev.DegreesRequested | ev.DegreesPlanned) -> None:
        """A session has engines planned; the commands that follow are its own."""
        self._plans_degrees = events
        self.feed(event)

    # -- what happens on the cluster ---------------------------------------------------------------

    @steering
    def engine_joined(self, engine: EngineDescription) -> None:
        """An engine takes steps."""
        self.feed(ev.EngineJoined(self.now(), engine))

    @steering
    def engine_died(self, engine_id: EngineId, reason: str) -> None:
        """An engine is gone, and its worker is not: each of its steps reports by itself."""
        for events in self._sessions.values():
            events.session.notify(EngineLostNotice(engine_id, reason))
        self.feed(ev.EngineLost(self.now(), engine_id, reason, stranded=False))

    @steering
    def engine_left(self, engine_id: EngineId, reason: str, *, stranded: bool) -> None:
        """An engine is gone with its worker (`stranded`), or because its worker was told to end it."""
        self._feed_loss(ev.EngineLost(self.now(), engine_id, reason, stranded))

    @steering
    def weights_fetched(self, report: WeightsFetchedReport) -> None:
        """An engine has weights at hand, or could not get them."""
        self.feed(
            ev.WeightsFetched(self.now(), report.engine_id, report.version, report.cause, report.seconds)
        )
        engine = self.controller.state.engines.get(report.engine_id)
        if report.cause and engine is not None and engine.weights.state is WeightsState.FAILED:
            for events in self._sessions.values():
                events.session.notify(
                    EngineUpdatedNotice(report.engine_id, report.version, cause=report.cause)
                )

    @steering
    def weights_installed(self, report: WeightsInstalledReport) -> None:
        """An engine samples with other weights, or could not load them."""
        for events in self._sessions.values():
            events.session.notify(
                EngineUpdatedNotice(report.engine_id, report.version, report.paused_s, report.cause)
            )
        self.feed(
            ev.WeightsInstalled(self.now(), report.engine_id, report.version, report.paused_s, report.cause)
        )

    @steering
    def engine_draining(self, engine_id: EngineId, ends_in_s: float) -> None:
        """The worker of an engine is about to leave."""
        now_s = self.now()
        self.feed(ev.EngineDraining(now_s, engine_id, now_s + ends_in_s))

    @steering
    def engine_expiring(self, engine_id: EngineId) -> None:
        """The worker of an engine leaves in a moment."""
        self.feed(ev.EngineExpiring(self.now(), engine_id))

    @steering
    def maxima_declared(self, maxima: tuple[PoolMaximum, ...]) -> None:
        """The cluster object has told which workers for actions its jobs will start."""
        self.feed(ev.PoolsDeclared(self.now(), pool_maxima=maxima))

    @steering
    def host_joined(self, host: HostDescription) -> None:
        """A host takes actions."""
        self.feed(ev.HostJoined(self.now(), host))

    @steering
    def host_draining(self, host_id: HostId) -> None:
        """The worker of a host is about to leave."""
        self.feed(ev.HostDraining(self.now(), host_id))

    @steering
    def host_lost(self, host_id: HostId) -> None:
        """A host is gone."""
        self._feed_loss(ev.HostLost(self.now(), host_id))

    @steering
    def time_reached(self, at_s: float) -> None:
        """A time has come for which the controller had asked; a timer may be early by the resolution of its clock."""
        self.feed(ev.TimeReached(self.now(at_least_s=at_s)))

    def _feed_loss(self, event: ev.Event) -> None:
        """A worker is gone: what it ran is held again, before the controller decides what becomes of it."""
        reclaimed = [(events, events.reclaim_stranded()) for events in self._sessions.values()]
        self.feed(event)
        for events, keys in reclaimed:
            events.session.return_unawaited(keys)

    def shares(self) -> tuple[RunShare, ...]:
        """What views show of the open sessions."""
        records = self.controller.state.runs
        sessions = [
            (each.session, records[run_id]) for run_id, each in self._sessions.items() if run_id in records
        ]
        return tuple(
            RunShare(
                session.session_id,
                session.run.strategy,
                session.run.weight,
                record.alive,
                len(record.unadmitted),
                record.held,
                record.sampled_tokens,
            )
            for session, record in sessions
        )

    def stop(self, reason: str) -> None:
        """End all sessions for a reason (one line) that their drivers are told."""
        for events in list(self._sessions.values()):
            events.session.stop(reason)

    def of_client(self, client_id: str) -> Iterable[SessionEvents]:
        """The open sessions of a client."""
        return [events for events in self._sessions.values() if events.session.client_id == client_id]
