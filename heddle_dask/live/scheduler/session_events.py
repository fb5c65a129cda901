"""Turns what happens in a session into events of its controller, and has the commands that follow carried out.

It decides nothing: which engine, in which order, with how many CPUs, all comes from the controller. Dask swallows
what a hook raises. Therefore every method is wrapped: the first failure is latched in the session, no further command
is issued, and the driver raises it at the client.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from distributed import Scheduler

from heddle_dask.core import events as ev
from heddle_dask.core.ids import EngineId, HostId
from heddle_dask.core.nouns import EngineDescription, HostDescription, StepRequest
from heddle_dask.live.scheduler.degree_planning import DegreePlanning
from heddle_dask.live.scheduler.deployment import EngineDeployment
from heddle_dask.live.scheduler.dispatcher import Dispatcher
from heddle_dask.live.scheduler.engine_registry import EngineRegistry
from heddle_dask.live.scheduler.session import Session
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.driver_messages import (
    EngineLostNotice,
    StepCancelledReport,
    SubmittedTrajectory,
    TrajectoriesEndedReport,
    TrajectoryForkedReport,
)
from heddle_dask.live.wire.messages import Key, StepEnd, Submission, is_key_of, step_key
from heddle_dask.live.wire.worker_messages import (
    ActionEndedReport,
    MoveEndedReport,
    StepEndedReport,
    StepFailedReport,
    StepStartedReport,
)
from heddle_dask.predictors.contract import Predictor

F = TypeVar("F", bound=Callable[..., None])


def guarded(hook: F) -> F:
    """Latch what a hook raises: Dask would log it and go on with a cluster that no controller steers."""

    @functools.wraps(hook)
    def wrapped(self: SessionEvents, *args: Any, **kwargs: Any) -> None:
        if self.session.closed or self.session.failure is not None:
            return
        try:
            hook(self, *args, **kwargs)
        except Exception:
            self.session.latch(traceback.format_exc())

    return wrapped  # type: ignore[return-value]


class SessionEvents:
    """The events of one session; does nothing once the session has failed or closed.

    Attributes
    ----------
    degrees
        Plans and deploys engines for the session.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        session: Session,
        registry: EngineRegistry,
        deployment: EngineDeployment,
        predictor: Predictor | None,
        released: Callable[[EngineId | HostId], None],
    ) -> None:
        self.session = session
        self.degrees = DegreePlanning(session, deployment, predictor, self.degrees_changed)
        session.degrees = self.degrees
        self._scheduler = scheduler
        self._dispatcher = Dispatcher(scheduler, session, registry, self.degrees, self.action_ended, released)

    def _feed(self, event: ev.Event) -> None:
        for command in self.session.handle(event):
            self._dispatcher.carry_out(command)

    # -- of the driver -----------------------------------------------------------------------------

    @guarded
    def trajectories_submitted(self, trajectories: Iterable[SubmittedTrajectory]) -> None:
        """The driver announced trajectories."""
        for each in trajectories:
            if self.session.predictions is not None:
                self.session.predictions.know(
                    each.spec.trajectory_id,
                    each.known_tokens,
                    each.known_tools_s,
                    each.known_observed_tokens,
                )
            self._feed(ev.TrajectorySubmitted(self.session.now(), each.spec))

    @guarded
    def tasks_submitted(self, submissions: Mapping[Key, Submission], priority: Mapping[Any, Any]) -> None:
        """Place the steps and actions of a submission, before Dask's first transition of them."""
        # Dask collects annotations in a set: only the priorities still know the order of submission.
        own = [key for key in submissions if is_key_of(self.session.session_id, key)]
        for key in sorted(own, key=priority.__getitem__):
            dask.hold(self._scheduler.tasks[key])
            self.session.held[key] = None
            request = submissions[key].request
            self._take_piggybacked_end(submissions[key].piggybacked_end)
            if isinstance(request, StepRequest):
                self._feed(ev.StepRequested(self.session.now(), request))
            else:
                self._feed(ev.ActionRequested(self.session.now(), request))

    def _take_piggybacked_end(self, end: StepEnd | None) -> None:
        """The driver has the result of a step: if its worker has not reported the end yet, the step ends now."""
        if end is None or not self.session.controller.awaits(end.step_id):
            return
        self._feed_end(ev.StepDelivered, end)
        # Its task is held if its worker died between the push to the driver and the report to the scheduler.
        self.session.return_unawaited([step_key(self.session.session_id, end.step_id)])

    def _feed_end(self, kind: type[ev.StepFinished], end: StepEnd) -> None:
        self._feed(
            kind(
                self.session.now(),
                step_id=end.step_id,
                engine_id=end.engine_id,
                new_tokens=end.new_tokens,
                cached_tokens=end.cached_tokens,
                finish_reason=end.finish_reason,
                policy_version=end.policy_version,
            )
        )

    @guarded
    def trajectory_forked(self, report: TrajectoryForkedReport) -> None:
        """A trajectory has a further branch."""
        self._feed(ev.TrajectoryForked(self.session.now(), report.spec, report.parent))

    @guarded
    def step_cancelled(self, report: StepCancelledReport) -> None:
        """The program of a trajectory does not wait for this step any more."""
        self.session.held.pop(step_key(self.session.session_id, report.step_id), None)
        self._feed(ev.StepCancelled(self.session.now(), report.step_id))

    @guarded
    def trajectories_ended(self, report: TrajectoriesEndedReport) -> None:
        """The programs of trajectories have ended."""
        for ended in report.ended:
            self._take_piggybacked_end(ended.piggybacked_end)
            known = self.session.controller.state.trajectories.get(ended.trajectory_id)
            if known is not None and self.session.predictions is not None:
                self.session.predictions.ended(known, ended.status)
            if self.session.watched is not None:
                self.session.watched.name_cause(ended.trajectory_id, ended.cause)
            self._feed(ev.TrajectoryEnded(self.session.now(), ended.trajectory_id, ended.status))

    # -- of workers --------------------------------------------------------------------------------

    @guarded
    def engine_joined(self, engine: EngineDescription) -> None:
        """An engine takes steps."""
        self._feed(ev.EngineJoined(self.session.now(), engine))

    @guarded
    def engine_died(self, engine_id: EngineId, reason: str) -> None:
        """An engine is gone, and its worker is not: each of its steps reports by itself."""
        self.session.notify(EngineLostNotice(engine_id, reason))
        self._feed(ev.EngineLost(self.session.now(), engine_id, reason, stranded=False))

    @guarded
    def engine_left(self, engine_id: EngineId, reason: str, *, stranded: bool) -> None:
        """An engine is gone with its worker (`stranded`), or because its worker was told to end it."""
        reclaimed = self._reclaim_stranded()
        self._feed(ev.EngineLost(self.session.now(), engine_id, reason, stranded))
        self.session.return_unawaited(reclaimed)

    @guarded
    def engine_draining(self, engine_id: EngineId, ends_in_s: float) -> None:
        """The worker of an engine is about to leave."""
        now_s = self.session.now()
        self._feed(ev.EngineDraining(now_s, engine_id, now_s + ends_in_s))

    @guarded
    def engine_expiring(self, engine_id: EngineId) -> None:
        """The worker of an engine leaves in a moment."""
        self._feed(ev.EngineExpiring(self.session.now(), engine_id))

    @guarded
    def host_draining(self, host_id: HostId) -> None:
        """The worker of a host is about to leave."""
        self._feed(ev.HostDraining(self.session.now(), host_id))

    @guarded
    def host_joined(self, host: HostDescription) -> None:
        """A host takes actions."""
        self._feed(ev.HostJoined(self.session.now(), host))

    @guarded
    def host_lost(self, host_id: HostId) -> None:
        """A host is gone."""
        reclaimed = self._reclaim_stranded()
        self._feed(ev.HostLost(self.session.now(), host_id))
        self.session.return_unawaited(reclaimed)

    def _reclaim_stranded(self) -> list[Key]:
        """Hold the session's tasks that Dask sent back to "no-worker" because their worker died."""
        reclaimed: list[Key] = []
        for ts in list(self._scheduler.unrunnable):
            key: Any = ts.key
            if is_key_of(self.session.session_id, key) and key not in self.session.held:
                dask.reset_suspicion(ts)
                dask.hold(ts)
                self.session.held[key] = None
                reclaimed.append(key)
        return reclaimed

    @guarded
    def step_started(self, report: StepStartedReport) -> None:
        """The engine has begun a step; it may still wait there for a slot."""
        self._feed(ev.StepStarted(self.session.now(), report.step_id, report.engine_id))

    @guarded
    def step_ended(self, report: StepEndedReport) -> None:
        """An engine answered a step."""
        self._feed_end(ev.StepFinished, report.end)

    @guarded
    def step_failed(self, report: StepFailedReport) -> None:
        """A step ended without an answer."""
        self._feed(ev.StepFailed(self.session.now(), report.step_id, report.engine_id, report.cause))

    @guarded
    def action_ended(self, report: ActionEndedReport) -> None:
        """An action ended, or was aborted before it could start."""
        self._feed(
            ev.ActionFinished(
                self.session.now(), report.action_id, report.host_id, report.run_s, report.ok, report.ran
            )
        )

    @guarded
    def move_ended(self, report: MoveEndedReport) -> None:
        """A context has arrived at its new worker, or will not."""
        self._feed(
            ev.MoveEnded(
                self.session.now(),
                trajectory_id=report.trajectory_id,
                target_engine_id=report.target_engine_id,
                ok=report.ok,
                kind=report.kind,
                seconds=report.seconds,
                tokens=report.tokens,
                cause=report.cause,
                source_engine_id=report.source_engine_id,
            )
        )

    # -- of what runs beside the event loop --------------------------------------------------------

    @guarded
    def prediction_made(self, event: ev.PredictionMade) -> None:
        """The predictor has answered."""
        self._feed(replace(event, at=self.session.now()))

    @guarded
    def degrees_changed(self, event: ev.DegreesRequested | ev.DegreesPlanned) -> None:
        """A batch is about to start, or its TP degrees have been searched."""
        self._feed(replace(event, at=self.session.now()))
