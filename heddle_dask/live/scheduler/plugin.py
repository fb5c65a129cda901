"""The plugin in the Dask scheduler: sessions, Dask's hooks, and which handler takes which message.

`SessionEvents` turns what happens in a session into events of its controller; `Dispatcher` carries out the commands.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, get_args

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from heddle_dask.core import events as ev
from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import TpDegreePlan
from heddle_dask.core.resources import GPUS, PoolMaximum
from heddle_dask.core.run_description import RunDescription
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.live.scheduler import metrics
from heddle_dask.live.scheduler.cluster_control import ClusterControl
from heddle_dask.live.scheduler.dashboard.registration import ensure_page
from heddle_dask.live.scheduler.demand import AnnouncedQueue, demand_of
from heddle_dask.live.scheduler.deployment import EngineDeployment
from heddle_dask.live.scheduler.engine_registry import EngineRegistry
from heddle_dask.live.scheduler.foreign_tasks import ForeignTasks
from heddle_dask.live.scheduler.gateway_relay import GatewayRelay
from heddle_dask.live.scheduler.gpu_seats import ENGINE, GpuSeats
from heddle_dask.live.scheduler.owned_engines import OwnedEngines
from heddle_dask.live.scheduler.predictions import Predictions
from heddle_dask.live.scheduler.session import Session
from heddle_dask.live.scheduler.session_events import SessionEvents
from heddle_dask.live.scheduler.snapshot_feed import SnapshotFeed
from heddle_dask.live.scheduler.warm_start import warm_predictor
from heddle_dask.live.scheduler.worker_drains import WorkerDrains
from heddle_dask.live.scheduler.worker_watch import LOOK_S, WorkerWatch
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire import cluster_messages as cluster
from heddle_dask.live.wire import driver_messages as driver
from heddle_dask.live.wire import training_messages as training
from heddle_dask.live.wire import worker_messages as workers
from heddle_dask.live.wire.envelopes import UNSTAMPED, Reported
from heddle_dask.live.wire.messages import (
    ENGINE_PLUGIN,
    ENGINE_RESOURCE,
    SCHEDULER_EVENT,
    STREAM_INTERVAL_S,
    TOOL_RESOURCE,
)
from heddle_dask.live.wire.results import ResultReport
from heddle_dask.live.wire.transport import Done, FaultReport, Handlers, ask_worker, guarded, send
from heddle_dask.predictors.chosen import build_predictor
from heddle_dask.predictors.known import KnownWork
from heddle_dask.strategies.described import cost_text, strategies_of_description
from heddle_dask.views.history.history_pictures import picture_of_run

PLUGIN_NAME = "heddle"
F = TypeVar("F", bound=Callable[..., None])


def hook(method: F) -> F:
    """A hook of Dask: where it fails a fact is missed, and no session can go on."""

    @functools.wraps(method)
    def wrapped(self: HeddleScheduler, *args: Any, **kwargs: Any) -> None:
        with guarded(method.__name__, "", self._failed):
            method(self, *args, **kwargs)

    return wrapped  # type: ignore[return-value]


class HeddleScheduler(SchedulerPlugin):
    """Steers the steps and actions of all sessions on the cluster, by one controller.

    Register with ``client.register_plugin(HeddleScheduler())`` or by ``--preload heddle_dask.preload.scheduler``;
    a second registration changes nothing.
    """

    name = PLUGIN_NAME
    idempotent = True

    def __init__(self) -> None:
        self._control: ClusterControl | None = None
        self._sessions: dict[str, SessionEvents] = {}
        self._left: dict[str, SessionEvents] = {}  # reports of their last steps and actions may still come
        self._registry = EngineRegistry()
        self._deployment = EngineDeployment(self._host_engine, self._retire, lambda node: self._seats.seated_on(node))
        self._seats = GpuSeats(self._host_engine, self._start_failed, self._deployment.gpus_on)
        self._foreign = ForeignTasks()
        self._owned = OwnedEngines(self._end_engines)
        self._queue = AnnouncedQueue()
        self._maxima: tuple[PoolMaximum, ...] = ()  # of the jobs of the cluster object
        self._drains = WorkerDrains(
            self._registry, lambda: self._control, lambda worker: self._deployment.forget_worker(worker)
        )
        self._watch = WorkerWatch(lambda: self._others(""))
        self._gateways = GatewayRelay(self._client_of, self._registry.hosts, self._tool_workers_may_come)
        # What a person sees of the cluster and its latest session.
        self.snapshots = SnapshotFeed(self._registry)
        self.snapshots.agents = lambda: (self._gateways.orders, self._gateways.open_orders)

    @property
    def control(self) -> ClusterControl | None:
        """What steers the open sessions; None where there is none."""
        return self._control

    async def start(self, scheduler: Scheduler) -> None:
        self.scheduler = self._drains.scheduler = self._gateways.scheduler = scheduler
        collect_seldom()
        handlers = Handlers(self._failed)
        handlers.take(FaultReport, self.worker_failed)
        handlers.answer(driver.StartSession, self.start_session)
        handlers.answer(driver.SubmitTrajectories, self.submit)
        handlers.answer(driver.FetchUpdates, self.updates)
        handlers.answer(driver.EndSession, self.end_session)
        handlers.answer(driver.GetCapacity, self.capacity)
        handlers.answer(cluster.GetSnapshot, self.snapshot)
        handlers.answer(driver.GetDeployedEngines, self._deployment.report)
        handlers.answer(driver.ClearEngines, self.clear_engines)
        handlers.answer(driver.ProvideEngines, self.provide_engines)
        handlers.answer(driver.OwnEngines, self.own_engines)
        handlers.answer(driver.AwaitEnginesEnd, self.engines_ended)
        handlers.answer(training.GetWeightStatus, self.weight_status)
        handlers.answer(cluster.ExchangeDemand, self.exchange_demand)
        handlers.answer(cluster.DrainWorkers, self._drains.drain)
        handlers.answer(workers.TakeGpus, self.take_gpus)
        handlers.take(workers.GpusReturnedReport, self.gpus_returned)
        announced: dict[type[Any], Callable[[str, Any], None]] = {
            workers.EngineWorkerReport: self.engine_worker,
            workers.EngineReadyReport: self.engine_ready,
            workers.EngineStartingReport: lambda worker, report: self._registry.starts(worker, report.phase),
            workers.EngineStartFailedReport: lambda worker, report: self._start_failed(worker, report.reason),
            workers.HostReadyReport: self.host_ready,
        }
        for announcement, handler in announced.items():
            handlers.take(announcement, self._unless_left(handler))
        handlers.take(workers.ActionPayloadWantedReport, self.payload_wanted)
        handlers.take(workers.SilenceReport, lambda worker, report: self._watch.tell(report.line))
        handlers.take(driver.TrajectoriesEndedReport, self.trajectories_ended)
        handlers.take(training.TrainingFiguresReport, self.training_figures)
        of_cluster: dict[type, Callable[[str, Any], None]] = {
            ev.EngineLost: self.engine_lost,
            ev.HostLost: self.host_lost,
            ev.WeightsFetched: self.weights_fetched,
            ev.WeightsInstalled: self.weights_installed,
            ev.ServiceLoaded: self.service_changed,
            ev.ServiceEvicted: self.service_changed,
            ev.ServiceLost: self.service_changed,
        }
        handlers.take(driver.SubmitTasks, self.tasks_submitted)
        self._gateways.add_to(handlers)
        handlers.take(ResultReport, self._unless_left(self.ended))
        for kind in get_args(Reported):
            handlers.take_report(kind, of_cluster.get(kind, self.session_event))
        handlers.add_to(scheduler)
        dask.pass_over_resources_of_removed(scheduler)
        dask.set_event(scheduler, SCHEDULER_EVENT)
        dask.call_every(scheduler, LOOK_S, self._look)
        self._foreign.workers_changed(scheduler)
        metrics.export(self.snapshots)
        ensure_page(scheduler)

    # -- requests of the driver --------------------------------------------------------------------

    async def start_session(self, request: driver.StartSession) -> Done:
        """Start a session: the first one with a controller of its own, others join it."""
        known = KnownWork()
        predictor = None
        run = RunDescription(
            name=request.session,
            weight=request.weight,
            strategy=request.strategy,
            overrides=request.overrides,
            seed=request.seed,
            cost=cost_text(request.cost),
            retries=request.retries,
            staleness=request.staleness,
            weights=request.weights,
        )
        strategies = strategies_of_description(run)
        if strategies.predictor is not None:
            # It imports XGBoost and may read a file: seconds.
            predictor = await asyncio.to_thread(build_predictor, strategies.predictor, known, warm_predictor)
        await self._owned.ended()  # the session would lose them as soon as it has begun
        control = self._shared_control()
        if control is not None:
            control.check_services(request.services)
        begins = control is None
        if control is None:
            self._left.clear()
            control = ClusterControl(request.session, strategies, request.retries)
            control.watched = self.snapshots.watch(
                request.session, request.strategy, control.now, request.name, request.environment
            )
            control.watched.runs = control.shares
            self._control = control
        run = replace(run, run_id=control.next_run())
        session = Session(request.session, request.client_id, control.controller, control.now, run, request.silence_s)
        session.name, session.environment = request.name, request.environment
        events = SessionEvents(
            self.scheduler,
            control,
            session,
            self._registry,
            self._deployment,
            predictor,
            self._drains.released,
        )
        if predictor is not None:
            session.predictions = Predictions(predictor, known, events.prediction_made, events.fail, session.now)
        self._sessions[request.session] = events
        control.join(session)
        self._owned.client_joined(request.client_id)
        dask.shorten_client_report_interval(self.scheduler, request.client_id, STREAM_INTERVAL_S)
        if begins:
            self._announce_workers(control)
        events.pools_declared(request.quotas, request.services)
        return Done()

    def _announce_workers(self, control: ClusterControl) -> None:
        if self._maxima:
            control.tell(ev.PoolsDeclared(UNSTAMPED, pool_maxima=self._maxima))
        for worker, engine in self._registry.engines.values():
            if worker not in self._drains:
                control.tell(ev.EngineJoined(UNSTAMPED, engine))
        for worker, host in self._registry.hosts.values():
            if worker not in self._drains:
                control.tell(ev.HostJoined(UNSTAMPED, host))

    def _shared_control(self) -> ClusterControl | None:
        """What steers the sessions that are open; None where the next one is the first."""
        control = self._control
        if control is None or control.failure is not None:
            return None
        for session in control.open_sessions:
            if session.client_id not in self.scheduler.clients:
                self._end(self._sessions[session.session_id])
        control.leave_failed()
        return control if control.open_sessions else None

    def _end(self, events: SessionEvents) -> None:
        """A session is over: its driver has ended it, or is gone."""
        events.session.close()
        self._sessions.pop(events.session.session_id, None)
        self._gateways.session_ended(events.session.session_id)
        events.control.leave(events.session)
        if self._control is not events.control:
            return
        self._left[events.session.session_id] = events
        if not self._control.open_sessions:
            self._left.clear()
            self._control = None
            self._clear_services()

    def _client_of(self, session_id: str) -> str | None:
        events = self._sessions.get(session_id)
        return None if events is None else events.session.client_id

    def _tool_workers_may_come(self) -> bool:
        queued = self._queue.now
        return bool(self._maxima) or queued.tool_workers + queued.starting_tool_workers > 0

    def _others(self, session_id: str) -> list[Session]:
        sessions = [] if self._control is None else self._control.open_sessions
        return [session for session in sessions if session.session_id != session_id]

    async def capacity(self, request: driver.GetCapacity) -> driver.Capacity:
        """Engines that answer, tool CPUs, workers by tag, and the latest failed start of each engine."""
        tags = [set(state.resources) for state in self.scheduler.workers.values()]
        return driver.Capacity(
            engines=tuple(
                ready
                for (worker, _), ready in zip(
                    self._registry.engines.values(), self._registry.ready_engines, strict=True
                )
                if worker not in self._drains
            ),
            tool_cpus=self._registry.tool_cpus,
            start_failures=dict(self._registry.start_failures),
            starting=tuple(self._registry.starting.values()),
            plugins=tuple(self.scheduler.worker_plugins),
            workers=len(tags),
            engine_workers=sum(ENGINE_RESOURCE in each for each in tags),
            tool_workers=sum(TOOL_RESOURCE in each for each in tags),
            engines_inherited=self._owned.inherited,
            sessions=tuple(self._control.session_ids) if self._control is not None else (),
            queued=self._queue.now,
            isolation=tuple((host_id, *self._registry.isolation[host_id]) for host_id in self._registry.hosts),
        )

    async def exchange_demand(self, request: cluster.ExchangeDemand) -> cluster.Demand:
        """Take what the cluster object has queued, and tell it what work there is."""
        self._queue.announce(request.queued, request.valid_s)
        if request.maxima != self._maxima:
            self._maxima = request.maxima
            if self._control is not None:
                self._control.tell(ev.PoolsDeclared(UNSTAMPED, pool_maxima=request.maxima))
        state = None if self._control is None else self._control.controller.state
        return demand_of(self.scheduler, self._registry, state, self._drains)

    async def snapshot(self, request: cluster.GetSnapshot) -> cluster.CurrentSnapshot:
        if not request.run:
            return cluster.CurrentSnapshot(self.snapshots.latest_json())
        try:
            return cluster.CurrentSnapshot(picture_of_run(self.snapshots.latest(), request.run).as_json())
        except KeyError:
            return cluster.CurrentSnapshot({"runs": [run.name or run.session for run in self.snapshots.latest().runs]})

    async def own_engines(self, request: driver.OwnEngines) -> Done:
        """The engines belong to the driver of this session from now on."""
        self._owned.own(self._open(request.session).session.client_id, request.kept_s)
        return Done()

    async def engines_ended(self, request: driver.AwaitEnginesEnd) -> Done:
        """Engines that are ending have ended."""
        await self._owned.ended()
        return Done()

    async def _end_engines(self) -> None:
        engines = list(self._registry.engines.items())
        if not await dask.forget_worker_plugin(self.scheduler, ENGINE_PLUGIN):
            return  # engines that were started with their workers go on
        # Reports of the workers may come after their answers: the next driver must not take these engines for running
        # ones, nor their GPUs for taken.
        for engine_id, (worker, _) in engines:
            if engine_id in self._registry.engines:
                self.engine_lost("", ev.EngineLost(UNSTAMPED, engine_id, "it was stopped", stranded=False))
                self.gpus_returned(worker, workers.GpusReturnedReport())

    async def submit(self, request: driver.SubmitTrajectories) -> Done:
        self._open(request.session).trajectories_submitted(request.trajectories)
        return Done()

    async def weight_status(self, request: training.GetWeightStatus) -> training.WeightStatus:
        """Versions of the engines, and the credits of the session."""
        return self._open(request.session).weight_status()

    async def provide_engines(self, request: driver.ProvideEngines) -> driver.EnginesProvided:
        """Have the controller decide on the TP degrees for a batch, and deploy its engines.

        While another session is open, engines stay as they are.
        """
        degrees = self._open(request.session).degrees
        running = tuple(sorted(each.tp_degree for each in self._deployment.assignments))
        others = self._others(request.session)
        if not others or (request.asked and tuple(sorted(request.asked)) == running):
            return await degrees.provide(request)
        if request.asked or not running:
            raise BadInput(
                f"session {others[0].session_id} uses the engines too: their TP degrees cannot change before "
                "it has ended"
            )
        return driver.EnginesProvided(TpDegreePlan(running[::-1], "kept: another session uses the engines"), 0)

    async def clear_engines(self, request: driver.ClearEngines) -> Done:
        """End the deployed engines and forget which worker has which GPUs: the workers' plugins are replaced."""
        self._seats.clear()
        return await self._deployment.clear(request)

    async def updates(self, request: driver.FetchUpdates) -> driver.Updates:
        """Long poll of the driver: notices, journal lines, counts, and the latched failure if any."""
        updates = await self._open(request.session).session.updates(request.wait_s)
        queued = {
            "engines_queued": self._queue.now.engines,
            "tool_workers_queued": self._queue.now.tool_workers,
            "engines_told": self._queue.now.engines_told,
        }
        return replace(updates, counts={**updates.counts, **queued})

    async def end_session(self, request: driver.EndSession) -> driver.Updates:
        """End the session once it has come to rest; answers with its last updates."""
        events = self._sessions.get(request.session)
        if events is None:
            return driver.Updates()
        await events.session.come_to_rest()
        last = events.session.last_updates()
        self._end(events)
        others = self._others(request.session)
        if others:
            self._owned.pass_on(events.session.client_id, others[0].client_id)
        ends_engines = not others and self._owned.is_owner(events.session.client_id)
        if ends_engines:
            self._owned.end()
        return replace(last, ends_engines=ends_engines)

    def _open(self, session_id: str) -> SessionEvents:
        if session_id not in self._sessions:
            raise RuntimeError(f"heddle session {session_id} is not open on this scheduler")
        return self._sessions[session_id]

    # -- Dask's hooks ------------------------------------------------------------------------------

    @hook
    def update_graph(self, scheduler: Scheduler, *, tasks: list[Any], **kwargs: Any) -> None:
        """A client has submitted a graph, which has nothing of ours."""
        self._foreign.submitted(scheduler, tasks)

    @hook
    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        self._foreign.workers_changed(scheduler)

    @hook
    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """A worker left or died: its engine and its host are lost with all that ran there."""
        self._foreign.workers_changed(scheduler)
        self._deployment.forget_worker(worker)
        self._seats.forget_worker(worker)
        self._gateways.worker_left(worker)
        drained = worker in self._drains
        self._drains.worker_left(worker)
        engines, hosts = self._registry.forget_worker(worker)
        if (engines or hosts) and not drained and not dask.left_as_asked(scheduler, worker):
            self._watch.died(worker, (*engines, *hosts)[0].rpartition("/")[0])
        if self._control is None:
            return
        for engine_id in engines:
            self._control.tell_loss(ev.EngineLost(UNSTAMPED, engine_id, "its worker left", stranded=True))
        for host_id in hosts:
            self._control.tell_loss(ev.HostLost(UNSTAMPED, host_id))

    @hook
    def restart(self, scheduler: Scheduler) -> None:
        """A client has restarted the cluster: Dask forgets all tasks and ends all workers."""
        if self._control is not None:
            self._control.stop("a client has restarted the cluster (Client.restart): all its tasks are gone")

    @hook
    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """A driver that has gone takes its session with it, and some time later its engines."""
        for events in [each for each in self._sessions.values() if each.session.client_id == client]:
            self._end(events)
        others = self._others("")
        if others:
            self._owned.pass_on(client, others[0].client_id)
        self._owned.client_left(client)

    @hook
    def _look(self) -> None:
        self._watch.look(self.scheduler)
        dask.forget_task_names()

    def _clear_services(self) -> None:
        """Have all hosts of model services end them: no session knows their copies any more."""
        for worker, host in self._registry.hosts.values():
            if host.resources[GPUS]:
                send(self.scheduler, workers.ClearServicesOrder(), worker)

    async def close(self) -> None:
        self._owned.close()
        self._drains.close()
        if self._control is not None:
            self._control.close()
        metrics.withdraw(self.snapshots)

    # -- faults of our own -------------------------------------------------------------------------

    def _failed(self, session: str, failure: str) -> None:
        """A handler or hook has failed: its session ends, or all that are open, where it is no session's own."""
        control = self._control
        if session in self._sessions:
            self._sessions[session].fail(failure)
        elif control is not None and session in ("", control.name):
            control.latch(failure)

    def worker_failed(self, worker: str, report: FaultReport) -> None:
        """A worker could not do what it should."""
        known = self.scheduler.workers.get(worker)
        self._failed(report.session, f"worker {known.name if known else worker}: {report.failure}")

    # -- engines and hosts -------------------------------------------------------------------------

    def _unless_left(self, handler: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
        """Take nothing from a worker that Dask has removed: its stream may still bring what it told before.

        Its engine would be given steps, and the loss of that engine would not be reported a second time. Its steps and
        actions are lost attempts, and run again.
        """

        def take(worker: str, report: Any) -> None:
            if worker in self.scheduler.workers:
                handler(worker, report)

        return take

    def engine_ready(self, worker: str, report: workers.EngineReadyReport) -> None:
        """An engine on `worker` answers; on one that is about to leave it would get no step."""
        if worker in self._drains:
            return
        self._deployment.started(report.engine.tp_degree, report.start_s)
        ready = driver.ReadyEngine(report.engine, report.kind, report.model, report.logprobs)
        if self._registry.add_engine(worker, ready):
            dask.shorten_worker_interval(self.scheduler, worker, STREAM_INTERVAL_S)
            if self._control is not None:
                self._control.tell(ev.EngineJoined(UNSTAMPED, report.engine))

    def engine_lost(self, session: str, event: ev.EngineLost) -> None:
        """The engine died under a living worker."""
        if self._registry.engines.pop(event.engine_id, None) is not None and self._control is not None:
            self._control.tell_drivers_too(event)

    def weights_fetched(self, session: str, event: ev.WeightsFetched) -> None:
        """An engine has weights at hand, or could not get them."""
        if self._control is not None:
            self._control.weights_fetched(event)

    def weights_installed(self, session: str, event: ev.WeightsInstalled) -> None:
        """An engine samples with other weights, or could not load them."""
        if not event.cause:
            self._registry.weights_installed(event.engine_id, event.version)
        if self._control is not None:
            self._control.tell_drivers_too(event)

    def engine_worker(self, worker: str, report: workers.EngineWorkerReport) -> None:
        """A worker waits for an order, or asks for GPUs for its own engine."""
        if report.wants is None:
            self._deployment.worker_waits(worker, report)
        else:
            self._seats.worker_asks(worker, report)

    async def take_gpus(self, request: workers.TakeGpus) -> workers.GpusTaken:
        """A trainer or model services need GPUs of their own."""
        return workers.GpusTaken(self._seats.take(request))

    def gpus_returned(self, worker: str, report: workers.GpusReturnedReport) -> None:
        """GPUs of a worker are free; without its engine, a start that failed is no news for the next run."""
        self._seats.give_back(worker, report.holder)
        if report.holder == ENGINE:
            self._registry.starts_no_more(worker)

    def host_ready(self, worker: str, report: workers.HostReadyReport) -> None:
        if worker in self._drains:
            return
        if self._registry.add_host(worker, report.host, report.isolation, report.weaker):
            dask.shorten_worker_interval(self.scheduler, worker, STREAM_INTERVAL_S)
            if self._control is not None:
                self._control.tell(ev.HostJoined(UNSTAMPED, report.host))

    def host_lost(self, session: str, event: ev.HostLost) -> None:
        if self._registry.hosts.pop(event.host_id, None) is not None and self._control is not None:
            self._control.tell_loss(event)

    def service_changed(self, session: str, event: ev.ServiceLoaded | ev.ServiceEvicted | ev.ServiceLost) -> None:
        """A host of model services has done what the controller of that session ordered, or has lost a copy."""
        if self._control is not None and self._control.name == session:
            self._control.tell(event)
            if isinstance(event, ev.ServiceLost):
                for each in self._control.open_sessions:
                    each.notify(driver.ProgressNotice(f"{event.cause}; its work goes on elsewhere"))

    def _start_failed(self, worker: str, reason: str) -> None:
        """An engine did not start, which a driver that waits for capacity reads there; empty: it starts after all."""
        if reason:
            self._registry.start_failed(worker, reason)
        else:
            self._registry.starts_no_more(worker)

    # -- of one session ----------------------------------------------------------------------------

    def session_event(self, session: str, event: Reported) -> None:
        """A driver or a worker reports an event; that of a controller which is gone is dropped."""
        events = self._known(session)
        if events is not None:
            events.take(event)

    def tasks_submitted(self, sender: str, message: driver.SubmitTasks) -> None:
        """The driver has made futures of steps and actions; those of a session that has ended stay without a task."""
        if message.session in self._sessions:
            self._sessions[message.session].tasks_submitted(message.tasks)

    def ended(self, worker: str, report: ResultReport) -> None:
        events = self._known(report.session)
        if events is not None:
            events.ended(report)

    def trajectories_ended(self, sender: str, report: driver.TrajectoriesEndedReport) -> None:
        events = self._known(report.session)
        if events is not None:
            events.trajectories_ended(report)

    def training_figures(self, sender: str, report: training.TrainingFiguresReport) -> None:
        """Figures of a training step, which decide nothing: they are shown."""
        events = self._known(report.session)
        if events is not None:
            events.training_figures(report)

    def _known(self, session: str) -> SessionEvents | None:
        """A session that is open, or has left a controller that goes on."""
        return self._sessions.get(session) or self._left.get(session)

    def payload_wanted(self, worker: str, report: workers.ActionPayloadWantedReport) -> None:
        """An action on `worker` waits for what the driver has kept."""
        if report.session in self._sessions:
            self._sessions[report.session].session.notify(driver.ActionPayloadWantedNotice(report.action_id, worker))

    async def _host_engine(self, worker: str, spec: Mapping[str, Any] | None) -> None:
        await ask_worker(self.scheduler, worker, workers.HostEngine(spec))

    def _retire(self, worker: str) -> None:
        """The engine of this worker ends on purpose: an event for the controller, and no notice for the driver."""
        self._registry.start_failures.pop(worker, None)
        for engine_id, (address, _) in list(self._registry.engines.items()):
            if address == worker:
                del self._registry.engines[engine_id]
                if self._control is not None:
                    reason = "its worker changes TP degree"
                    self._control.tell_loss(ev.EngineLost(UNSTAMPED, engine_id, reason, stranded=False))
