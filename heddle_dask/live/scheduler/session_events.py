"""Turns what happens in a session into events of the controller, and has the commands that follow carried out.

It decides nothing: which engine, in which order, with how many CPUs, all comes from the controller. Dask swallows
what a hook raises. Therefore every method is wrapped: the first failure is latched in the session, which leaves the
controller, and the driver raises it at the client. What concerns the whole cluster is told to `ClusterControl`.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Mapping
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
from heddle_dask.live.scheduler.open_sandboxes import OpenSandboxes
from heddle_dask.live.scheduler.session import Session
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.driver_messages import (
    DeclaredService,
    ProgramEndedReport,
    SandboxClosedReport,
    StepCancelledReport,
    SubmittedTrajectory,
    TrajectoriesEndedReport,
    TrajectoryForkedReport,
)
from heddle_dask.live.wire.messages import Key, StepEnd, Submission, is_key_of, step_key
from heddle_dask.live.wire.service_messages import (
    ServiceEvictedReport,
    ServiceLoadedReport,
    ServiceLostReport,
)
from heddle_dask.live.wire.training_messages import (
    EngineWeightState,
    GroupEndedReport,
    OptimizerStepReport,
    SwitchReport,
    TrainingFiguresReport,
    TrajectoryRedundantReport,
    WeightsPublishedReport,
    WeightStatus,
)
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
    """Latch what a hook raises: Dask would log it and go on with a session that no controller steers."""

    @functools.wraps(hook)
    def wrapped(self: SessionEvents, *args: Any, **kwargs: Any) -> None:
        if not self.session.closed and self.session.failure is None:
            self.attempt(hook, self, *args, **kwargs)

    return wrapped  # type: ignore[return-value]


def guarded_to_the_end(hook: F) -> F:
    """As `guarded`, and also for a session that has left: what it occupied is free for the others only now."""

    @functools.wraps(hook)
    def wrapped(self: SessionEvents, *args: Any, **kwargs: Any) -> None:
        if self.control.open_sessions:
            self.attempt(hook, self, *args, **kwargs)

    return wrapped  # type: ignore[return-value]


class SessionEvents:
    """The events of one session; does nothing once the session has failed or closed, but free what it occupied.

    Attributes
    ----------
    degrees
        Plans and deploys engines for the session.
    """

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
        self.degrees = DegreePlanning(session, deployment, predictor, self.degrees_changed)
        session.degrees = self.degrees
        session.services = control.services
        session.controller_name = control.name
        session.sandboxes = OpenSandboxes(scheduler, session, registry)
        self._scheduler = scheduler
        self._dispatcher = Dispatcher(
            scheduler, session, registry, self.degrees, self.action_ended, released, control.time_reached
        )

    def _feed(self, event: ev.Event) -> None:
        self.control.feed(self.session.names.qualify(event))

    def attempt(self, hook: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run a hook; what it raises ends the session."""
        try:
            hook(*args, **kwargs)
        except Exception:
            self.fail(traceback.format_exc())

    def fail(self, failure: str) -> None:
        """The session has failed: its driver is told, and it leaves others alone from the next turn of the loop on."""
        self.session.latch(failure)
        self._scheduler.loop.add_callback(self.control.leave_others_alone, self)

    def carry_out(self, command: Command) -> None:
        """Do what a command says, which is in the names of this session."""
        self.attempt(self._dispatcher.carry_out, command)

    # -- of the driver -----------------------------------------------------------------------------

    @guarded
    def pools_declared(self, quotas: tuple[ApiQuota, ...], services: Iterable[DeclaredService]) -> None:
        """The run declares quotas of APIs and model services."""
        declared = tuple(services)
        self.session.services |= {each.facts.name: each.spec for each in declared}
        if quotas or declared:
            facts = tuple(each.facts for each in declared)
            self._feed(ev.PoolsDeclared(self.session.now(), quotas, facts))

    @guarded
    def trajectories_submitted(self, trajectories: Iterable[SubmittedTrajectory]) -> None:
        """The driver announced trajectories."""
        for each in trajectories:
            if self.session.predictions is not None:
                self.session.predictions.know(
                    self.session.names.of(each.spec.trajectory_id),
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
        if end is None or not self.session.awaits(end.step_id):
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
    def program_ended(self, report: ProgramEndedReport) -> None:
        """The program of a trajectory has returned, and its reward follows."""
        self._take_piggybacked_end(report.piggybacked_end)
        known = self.session.trajectory(report.trajectory_id)
        if known is not None and self.session.predictions is not None:
            self.session.predictions.ended(known, "completed")
        self._feed(ev.ProgramEnded(self.session.now(), report.trajectory_id))

    def sandbox_closed(self, report: SandboxClosedReport) -> None:
        """The program of a trajectory needs a sandbox no longer."""
        self._feed(ev.SandboxClosed(self.session.now(), report.sandbox))

    @guarded
    def trajectories_ended(self, report: TrajectoriesEndedReport) -> None:
        """The programs of trajectories have ended."""
        for ended in report.ended:
            self._take_piggybacked_end(ended.piggybacked_end)
            known = self.session.trajectory(ended.trajectory_id)
            told = known is None or known.state is TrajectoryState.SCORING
            if known is not None and not told and self.session.predictions is not None:
                self.session.predictions.ended(known, ended.status)
            if self.control.watched is not None:
                self.control.watched.name_cause(self.session.names.of(ended.trajectory_id), ended.cause)
            self._feed(ev.TrajectoryEnded(self.session.now(), ended.trajectory_id, ended.status))

    # -- of training -------------------------------------------------------------------------------

    @guarded
    def optimizer_step(self, report: OptimizerStepReport) -> None:
        """The trainer has finished an optimiser step, or begins with this version."""
        self._feed(ev.OptimizerStepEnded(self.session.now(), self.session.run.run_id, report.version))

    @guarded
    def weights_published(self, report: WeightsPublishedReport) -> None:
        """The trainer has published weights."""
        now_s, run_id = self.session.now(), self.session.run.run_id
        self._feed(ev.WeightsPublished(now_s, report.version, report.uri, report.nbytes, run_id))

    @guarded
    def switch_requested(self, report: SwitchReport) -> None:
        """Engines are to go over to newer weights."""
        self._feed(ev.SwitchRequested(self.session.now(), report.version))

    @guarded
    def group_ended(self, report: GroupEndedReport) -> None:
        """A group has left the driver or the sample buffer."""
        now_s, run_id = self.session.now(), self.session.run.run_id
        self._feed(ev.GroupEnded(now_s, run_id, report.group_id, report.accepted))

    @guarded
    def trajectory_redundant(self, report: TrajectoryRedundantReport) -> None:
        """The driver has enough without a trajectory."""
        self._feed(ev.TrajectoryRedundant(self.session.now(), report.trajectory_id))

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

    # -- of workers --------------------------------------------------------------------------------

    def reclaim_stranded(self) -> list[Key]:
        """Hold the session's tasks that Dask sent back to "no-worker" because their worker died; returns their keys."""
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

    @guarded_to_the_end
    def action_ended(self, report: ActionEndedReport) -> None:
        """An action ended, or was aborted before it could start."""
        self._feed(
            ev.ActionFinished(
                self.session.now(),
                report.action_id,
                report.host_id,
                report.run_s,
                report.ok,
                report.ran,
                report.ended_by,
                report.retry_after_s,
            )
        )

    @guarded_to_the_end
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

    @guarded_to_the_end
    def service_loaded(self, report: ServiceLoadedReport) -> None:
        """A copy of a model service is resident, or its load has failed."""
        self._feed(
            ev.ServiceLoaded(
                self.session.now(),
                report.host_id,
                report.service,
                report.first_gpu,
                report.gpus,
                report.ok,
                report.seconds,
                report.cause,
            )
        )

    @guarded_to_the_end
    def service_evicted(self, report: ServiceEvictedReport) -> None:
        """A copy of a model service has left its GPUs."""
        self._feed(
            ev.ServiceEvicted(
                self.session.now(), report.host_id, report.service, report.first_gpu, report.gpus
            )
        )

    @guarded_to_the_end
    def service_lost(self, report: ServiceLostReport) -> None:
        """A resident copy of a model service has died."""
        self._feed(
            ev.ServiceLost(
                self.session.now(),
                report.host_id,
                report.service,
                report.first_gpu,
                report.gpus,
                report.cause,
            )
        )

    # -- of what runs beside the event loop --------------------------------------------------------

    @guarded
    def prediction_made(self, event: ev.PredictionMade) -> None:
        """The predictor has answered."""
        self.control.feed(replace(event, at=self.session.now()))  # it names the controller's trajectory

    @guarded
    def degrees_changed(self, event: ev.DegreesRequested | ev.DegreesPlanned) -> None:
        """A batch is about to start, or its TP degrees have been searched."""
        self.control.plan_degrees(self, replace(event, at=self.session.now()))
