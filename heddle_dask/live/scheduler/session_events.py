"""Turns what happens in a session into events of the controller, and has the commands that follow carried out.

It decides nothing: which engine, in which order, with how many CPUs, all comes from the controller. Dask swallows
what a hook raises. Therefore every method is wrapped: the first failure is latched in the session, which leaves the
controller, and the driver raises it at the client. What concerns the whole cluster is told to `ClusterControl`.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from distributed import Scheduler

from heddle_dask.core import events as ev
from heddle_dask.core.commands import Command
from heddle_dask.core.ids import EngineId, HostId
from heddle_dask.core.nouns import StepRequest
from heddle_dask.core.resources import ApiQuota
from heddle_dask.core.snapshot import engine_versions, staleness_counts
from heddle_dask.core.transitions import TrajectoryState
from heddle_dask.live.scheduler.cluster_control import ClusterControl
from heddle_dask.live.scheduler.degree_planning import DegreePlanning
from heddle_dask.live.scheduler.deployment import EngineDeployment
from heddle_dask.live.scheduler.dispatcher import Dispatcher
from heddle_dask.live.scheduler.engine_registry import EngineRegistry
from heddle_dask.live.scheduler.session import Session
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.driver_messages import (
    DeclaredService,
    SubmittedTask,
    SubmittedTrajectory,
    TrajectoriesEndedReport,
)
from heddle_dask.live.wire.envelopes import UNSTAMPED, Reported
from heddle_dask.live.wire.messages import Key, action_key, is_key_of, step_key
from heddle_dask.live.wire.results import Ended, ResultNotice, ResultReport
from heddle_dask.live.wire.training_messages import EngineWeightState, TrainingFiguresReport, WeightStatus
from heddle_dask.predictors.contract import Predictor

F = TypeVar("F", bound=Callable[..., None])


def guarded(hook: F) -> F:
    """Latch what a hook raises: Dask would log it and go on with a session that no controller steers."""

    @functools.wraps(hook)
    def wrapped(self: SessionEvents, *args: Any, **kwargs: Any) -> None:
        if not self.session.closed and self.session.failure is None:
            self.attempt(hook, self, *args, **kwargs)

    return wrapped  # type: ignore[return-value]


# What a session occupied is free for the others only when these have come, also if it has left.
_TO_THE_END = (ev.ActionFinished, ev.MoveEnded, ev.SandboxClosed)


class SessionEvents:
    """The events of one session; does nothing once the session has failed or closed, but free what it occupied."""

    def __init__(
        self,
        scheduler: Scheduler,
        control: ClusterControl,
        session: Session,
        registry: EngineRegistry,
        deployment: EngineDeployment,
        predictor: Predictor | None,
        released: Callable[[EngineId | HostId], None],
    ) -> None:
        self.control = control
        self.session = session
        # Plans and deploys engines for the session.
        self.degrees = DegreePlanning(session, deployment, predictor, self.degrees_changed)
        session.services = control.services
        session.controller_name = control.name
        session.carry_out, session.reclaim_stranded = self.carry_out, self.reclaim_stranded
        self._scheduler = scheduler
        self._dispatcher = Dispatcher(
            scheduler, session, registry, self.degrees, self.take, released, control.time_reached
        )
        session.on_close += [self.degrees.close, self._dispatcher.close]

    def _feed(self, event: ev.Event) -> None:
        """Hand an event of the session to the controller, stamped with the time."""
        self.control.feed(self.session.names.qualify(replace(event, at=self.session.now())))

    def attempt(self, hook: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run a hook; what it raises ends the session."""
        try:
            hook(*args, **kwargs)
        except Exception:
            self.fail(traceback.format_exc())

    def fail(self, failure: str) -> None:
        """The session has failed: its driver is told, and it leaves others alone from the next turn of the loop on."""
        self.session.latch(failure)
        self._scheduler.loop.add_callback(self.control.leave_others_alone, self.session)

    def carry_out(self, command: Command) -> None:
        """Do what a command says, which is in the names of this session."""
        self.attempt(self._dispatcher.carry_out, command)

    # -- of the driver -----------------------------------------------------------------------------

    @guarded
    def pools_declared(self, quotas: tuple[ApiQuota, ...], services: Iterable[DeclaredService]) -> None:
        declared = tuple(services)
        self.session.services |= {each.facts.name: each.spec for each in declared}
        if quotas or declared:
            facts = tuple(each.facts for each in declared)
            self._feed(ev.PoolsDeclared(UNSTAMPED, quotas, facts))

    @guarded
    def trajectories_submitted(self, trajectories: Iterable[SubmittedTrajectory]) -> None:
        for each in trajectories:
            if self.session.predictions is not None:
                self.session.predictions.know(
                    self.session.names.of(each.spec.trajectory_id),
                    each.known_tokens,
                    each.known_tools_s,
                    each.known_observed_tokens,
                )
            self._feed(ev.TrajectorySubmitted(UNSTAMPED, each.spec))

    @guarded
    def tasks_submitted(self, tasks: Sequence[SubmittedTask]) -> None:
        """Make steps and actions Dask tasks, and place them before Dask's first transition of them."""
        dask.create_held(self._scheduler, self.session.client_id, [(task.key, task.run) for task in tasks])
        for task in tasks:
            self.session.held[task.key] = None
            if isinstance(task.request, StepRequest):
                self._feed(ev.StepRequested(UNSTAMPED, task.request))
            else:
                self._feed(ev.ActionRequested(UNSTAMPED, task.request))
        dask.begin(self._scheduler, [task.key for task in tasks], f"heddle-submit-{tasks[0].key[2]}")

    @guarded
    def trajectories_ended(self, report: TrajectoriesEndedReport) -> None:
        for ended in report.ended:
            trajectory_id, status = ended.event.trajectory_id, ended.event.status
            known = self.session.trajectory(trajectory_id)
            told = known is None or known.state is TrajectoryState.SCORING
            if known is not None and not told and self.session.predictions is not None:
                self.session.predictions.ended(known, status)
            if self.control.watched is not None:
                history = self.control.watched.history
                name = self.session.names.of(trajectory_id)
                history.tell_end(name, ended.cause, ended.reward, ended.message)
            self._feed(ended.event)

    # -- of drivers and workers --------------------------------------------------------------------

    def ended(self, report: ResultReport) -> None:
        """A step or an action has ended: the controller knows it first, then the driver."""
        self.take(report.event)
        if report.result and not self.session.closed:
            notice = ResultNotice(report.session, report.key, report.result)
            dask.send_to_client(self._scheduler, self.session.client_id, notice.to_wire())

    def take(self, event: Reported | Ended) -> None:
        if isinstance(event, _TO_THE_END):
            if self.control.open_sessions:
                self.attempt(self._feed, event)
        elif not self.session.closed and self.session.failure is None:
            self.attempt(self._take, event)

    def _take(self, event: Reported | Ended) -> None:
        session = self.session
        match event:
            case ev.StepCancelled():
                session.held.pop(step_key(session.session_id, event.step_id), None)
            case ev.ActionCancelled():
                session.held.pop(action_key(session.session_id, event.action_id), None)
            case ev.ProgramEnded():
                known = session.trajectory(event.trajectory_id)
                if known is not None and session.predictions is not None:
                    session.predictions.ended(known, "completed")
        self._feed(event)

    # -- of training -------------------------------------------------------------------------------

    def training_figures(self, report: TrainingFiguresReport) -> None:
        """Figures of a training step, which decide nothing: they are shown."""
        if self.control.watched is not None:
            self.control.watched.history.training.add_point(report.step, report.figures)

    def weight_status(self) -> WeightStatus:
        """Versions of the engines, and the credits of the session."""
        state = self.session.controller.state
        account = staleness_counts(state, self.session.run.run_id)
        engines = tuple(
            EngineWeightState(each.engine_id, each.installed, each.target, each.state, each.cause)
            for each in engine_versions(state)
        )
        published, wanted = state.weights.published, state.weights.wanted
        if account is None:
            return WeightStatus(engines, published, wanted)
        return WeightStatus(
            engines,
            published,
            wanted,
            True,
            account.credits,
            account.accepted,
            account.running,
            account.optimizer_steps,
        )

    # -- of Dask -----------------------------------------------------------------------------------

    def reclaim_stranded(self) -> list[Key]:
        """Hold the session's tasks that Dask sent back to "no-worker" because their worker died; returns their keys.

        One that is bound to a living worker has just been dispatched there, and goes at the next turn of the loop: two
        workers that die in one turn (a node, a network) are two losses.
        """
        reclaimed: list[Key] = []
        for ts in list(self._scheduler.unrunnable):
            key: Any = ts.key
            dispatched = ts.worker_restrictions and ts.worker_restrictions <= self._scheduler.workers.keys()
            if is_key_of(self.session.session_id, key) and key not in self.session.held and not dispatched:
                dask.reset_suspicion(ts)
                dask.hold(ts)
                self.session.held[key] = None
                reclaimed.append(key)
        return reclaimed

    # -- of what runs beside the event loop --------------------------------------------------------

    @guarded
    def prediction_made(self, event: ev.PredictionMade) -> None:
        self.control.feed(replace(event, at=self.session.now()))  # it names the controller's trajectory

    @guarded
    def degrees_changed(self, event: ev.DegreesRequested | ev.DegreesPlanned) -> None:
        """A batch is about to start, or its TP degrees have been searched."""
        self.control.plan_degrees(self.session, replace(event, at=self.session.now()))
