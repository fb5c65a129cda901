"""The plugin in the Dask scheduler: sessions, Dask's hooks, and which handler takes which message.

`SessionEvents` turns what happens in a session into events of its controller; `Dispatcher` carries out the commands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.live.scheduler import metrics
from heddle_dask.live.scheduler.dashboard.registration import ensure_page
from heddle_dask.live.scheduler.demand import AnnouncedQueue, demand_of
from heddle_dask.live.scheduler.deployment import EngineDeployment
from heddle_dask.live.scheduler.engine_registry import EngineRegistry
from heddle_dask.live.scheduler.foreign_tasks import ForeignTasks
from heddle_dask.live.scheduler.gpu_seats import GpuSeats
from heddle_dask.live.scheduler.owned_engines import OwnedEngines
from heddle_dask.live.scheduler.predictions import Predictions
from heddle_dask.live.scheduler.session import Session
from heddle_dask.live.scheduler.session_events import SessionEvents
from heddle_dask.live.scheduler.snapshot_feed import SnapshotFeed
from heddle_dask.live.scheduler.warm_start import warm_predictor
from heddle_dask.live.scheduler.worker_drains import WorkerDrains
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire import cluster_messages as cluster
from heddle_dask.live.wire import drain_messages as drains
from heddle_dask.live.wire import driver_messages as driver
from heddle_dask.live.wire import watch_messages as watching
from heddle_dask.live.wire import worker_messages as workers
from heddle_dask.live.wire.codec import Message
from heddle_dask.live.wire.messages import ENGINE_PLUGIN, ENGINE_RESOURCE, STREAM_INTERVAL_S, TOOL_RESOURCE
from heddle_dask.live.wire.transport import Done, Handlers, ask_worker
from heddle_dask.predictors.chosen import build_predictor
from heddle_dask.predictors.known import KnownWork
from heddle_dask.strategies.presets import strategies_of_run

PLUGIN_NAME = "heddle"


M = TypeVar("M", bound=Message)


class HeddleScheduler(SchedulerPlugin):
    """Steers the steps and actions of one session at a time.

    Register with ``client.register_plugin(HeddleScheduler())`` or by ``--preload workers.scheduler``;
    a second registration changes nothing.

    Attributes
    ----------
    snapshots
        What a person sees of the cluster and its latest session.
    """

    name = PLUGIN_NAME
    idempotent = True

    def __init__(self) -> None:
        self._events: SessionEvents | None = None
        self._registry = EngineRegistry()
        self._deployment = EngineDeployment(self._host_engine, self._retire)
        self._seats = GpuSeats(self._host_engine, self._start_failed)
        self._foreign = ForeignTasks()
        self._owned = OwnedEngines(self._end_engines)
        self._queue = AnnouncedQueue()
        self._drains = WorkerDrains(
            self._registry, lambda: self._events, lambda worker: self._deployment.forget_worker(worker)
        )
        self.snapshots = SnapshotFeed(self._registry)

    @property
    def session(self) -> Session | None:
        """The session that is open."""
        return None if self._events is None else self._events.session

    async def start(self, scheduler: Scheduler) -> None:
        """Add our handlers."""
        self.scheduler = self._drains.scheduler = scheduler
        collect_seldom()
        handlers = Handlers()
        handlers.answer(driver.StartSession, self.start_session)
        handlers.answer(driver.SubmitTrajectories, self.submit)
        handlers.answer(driver.FetchUpdates, self.updates)
        handlers.answer(driver.EndSession, self.end_session)
        handlers.answer(driver.GetCapacity, self.capacity)
        handlers.answer(watching.GetSnapshot, self.snapshot)
        handlers.answer(driver.GetDeployedEngines, self._deployment.report)
        handlers.answer(driver.ClearEngines, self.clear_engines)
        handlers.answer(driver.ProvideEngines, self.provide_engines)
        handlers.answer(driver.OwnEngines, self.own_engines)
        handlers.answer(cluster.ExchangeDemand, self.exchange_demand)
        handlers.answer(drains.DrainWorkers, self._drains.drain)
        handlers.take(workers.EngineWorkerReport, self.engine_worker)
        handlers.take(workers.GpusReturnedReport, lambda worker, _: self._seats.forget_worker(worker))
        handlers.take(workers.EngineReadyReport, self.engine_ready)
        handlers.take(workers.EngineLostReport, self.engine_lost)
        handlers.take(workers.EngineStartFailedReport, self.engine_start_failed)
        handlers.take(workers.HostReadyReport, self.host_ready)
        handlers.take(workers.HostLostReport, self.host_lost)
        take = self._take_of_session
        take(handlers, driver.TrajectoriesEndedReport, SessionEvents.trajectories_ended)
        take(handlers, driver.TrajectoryForkedReport, SessionEvents.trajectory_forked)
        take(handlers, driver.StepCancelledReport, SessionEvents.step_cancelled)
        take(handlers, workers.StepStartedReport, SessionEvents.step_started)
        take(handlers, workers.StepEndedReport, SessionEvents.step_ended)
        take(handlers, workers.StepFailedReport, SessionEvents.step_failed)
        take(handlers, workers.ActionEndedReport, SessionEvents.action_ended)
        take(handlers, workers.MoveEndedReport, SessionEvents.move_ended)
        handlers.take(workers.ActionPayloadWantedReport, self.payload_wanted)
        handlers.add_to(scheduler)
        self._foreign.workers_changed(scheduler)
        metrics.export(self.snapshots)
        ensure_page(scheduler)

    def _take_of_session(
        self, handlers: Handlers, kind: type[M], take: Callable[[SessionEvents, M], None]
    ) -> None:
        """Have messages of the open session taken; those of an earlier session are dropped."""

        def handle(sender: str, message: Any) -> None:
            if self._events is not None and self._events.session.session_id == message.session:
                take(self._events, message)

        handlers.take(kind, handle)

    # -- requests of the driver --------------------------------------------------------------------

    async def start_session(self, request: driver.StartSession) -> Done:
        """Start a session with its own controller; refused while another client's session is open."""
        known = KnownWork()
        predictor = None
        self._check_free()
        strategies = strategies_of_run(
            {
                "strategy": request.strategy,
                "overrides": request.overrides,
                "seed": request.seed,
                "cost": request.cost,
            }
        )
        if strategies.predictor is not None:
            # It imports XGBoost and may read a file: seconds.
            predictor = await asyncio.to_thread(build_predictor, strategies.predictor, known, warm_predictor)
            self._check_free()
        if self.session is not None:
            self.session.close()
        session = Session(request.session, request.client_id, Controller(strategies, request.retries))
        session.watched = self.snapshots.watch(request.session, request.strategy, session.now)
        events = SessionEvents(
            self.scheduler, session, self._registry, self._deployment, predictor, self._drains.released
        )
        if predictor is not None:
            session.predictions = Predictions(
                predictor, known, events.prediction_made, session.latch, session.now
            )
        self._events = events
        self._owned.client_joined(request.client_id)
        dask.shorten_client_report_interval(self.scheduler, request.client_id, STREAM_INTERVAL_S)
        for worker, engine in self._registry.engines.values():
            if worker not in self._drains:
                events.engine_joined(engine)
        for worker, host in self._registry.hosts.values():
            if worker not in self._drains:
                events.host_joined(host)
        return Done()

    def _check_free(self) -> None:
        if self.session is not None and self.session.client_id in self.scheduler.clients:
            raise BadInput(
                f"this cluster already runs heddle session {self.session.session_id} of "
                f"{self.session.client_id}; close it, or use another cluster"
            )

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
            plugins=tuple(self.scheduler.worker_plugins),
            workers=len(tags),
            engine_workers=sum(ENGINE_RESOURCE in each for each in tags),
            tool_workers=sum(TOOL_RESOURCE in each for each in tags),
            engines_inherited=self._owned.inherited,
            queued=self._queue.now,
        )

    async def exchange_demand(self, request: cluster.ExchangeDemand) -> cluster.Demand:
        """Take what the cluster object has queued, and tell it what work there is."""
        self._queue.announce(request.queued, request.valid_s)
        state = None if self.session is None else self.session.controller.state
        return demand_of(self.scheduler, self._registry, state, self._drains)

    async def snapshot(self, request: watching.GetSnapshot) -> watching.CurrentSnapshot:
        """The picture of this interval."""
        return watching.CurrentSnapshot(self.snapshots.latest_json())

    async def own_engines(self, request: driver.OwnEngines) -> Done:
        """The engines belong to the driver of this session from now on, or no longer."""
        if request.kept_s is None:
            self._owned.release()
        else:
            self._owned.own(self._open(request.session).session.client_id, request.kept_s)
        return Done()

    async def _end_engines(self) -> None:
        await dask.forget_worker_plugin(self.scheduler, ENGINE_PLUGIN)

    async def submit(self, request: driver.SubmitTrajectories) -> Done:
        """Announce trajectories; a notice admits each."""
        self._open(request.session).trajectories_submitted(request.trajectories)
        return Done()

    async def provide_engines(self, request: driver.ProvideEngines) -> driver.EnginesProvided:
        """Have the controller decide on the TP degrees for a batch, and deploy its engines."""
        return await self._open(request.session).degrees.provide(request)

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
        }
        return replace(updates, counts={**updates.counts, **queued})

    async def end_session(self, request: driver.EndSession) -> driver.Updates:
        """End the session once it has come to rest; answers with its last updates."""
        ending = self.session
        if ending is None or ending.session_id != request.session:
            return driver.Updates()
        await ending.come_to_rest()
        last = await ending.updates(0)
        ending.close()
        if self.session is ending:
            self._events = None
        return last

    def _open(self, session_id: str) -> SessionEvents:
        if self._events is None or self._events.session.session_id != session_id:
            raise RuntimeError(f"heddle session {session_id} is not open on this scheduler")
        return self._events

    # -- Dask's hooks ------------------------------------------------------------------------------

    def update_graph(
        self,
        scheduler: Scheduler,
        *,
        client: str,
        tasks: list[Any],
        keys: set[Any],
        annotations: Mapping[str, Mapping[Any, Any]],
        priority: Mapping[Any, Any],
        **kwargs: Any,
    ) -> None:
        """Place the steps and actions of a submission, before Dask's first transition of them."""
        submissions = annotations.get(dask.ANNOTATION)
        if not submissions:
            self._foreign.submitted(scheduler, tasks)
        elif self._events is not None:
            self._events.tasks_submitted(submissions, priority)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """A worker joined."""
        self._foreign.workers_changed(scheduler)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """A worker left or died: its engine and its host are lost with all that ran there."""
        self._foreign.workers_changed(scheduler)
        self._deployment.forget_worker(worker)
        self._seats.forget_worker(worker)
        self._drains.worker_left(worker)
        engines, hosts = self._registry.forget_worker(worker)
        if self._events is None:
            return
        for engine_id in engines:
            self._events.engine_left(engine_id, "its worker left", stranded=True)
        for host_id in hosts:
            self._events.host_lost(host_id)

    def restart(self, scheduler: Scheduler) -> None:
        """A client has restarted the cluster: Dask forgets all tasks and ends all workers."""
        if self.session is not None:
            self.session.stop("a client has restarted the cluster (Client.restart): all its tasks are gone")

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """A driver that has gone takes its session with it, and some time later its engines."""
        self._owned.client_left(client)
        if self.session is not None and self.session.client_id == client:
            self.session.close()
            self._events = None

    async def close(self) -> None:
        """The scheduler ends."""
        self._owned.close()
        self._drains.close()
        metrics.withdraw(self.snapshots)

    # -- engines and hosts -------------------------------------------------------------------------

    def engine_ready(self, worker: str, report: workers.EngineReadyReport) -> None:
        """An engine on `worker` answers; on one that is about to leave it would get no step."""
        if worker in self._drains:
            return
        self._deployment.started(report.engine.tp_degree, report.start_s)
        ready = driver.ReadyEngine(report.engine, report.kind, report.model, report.logprobs)
        if self._registry.add_engine(worker, ready):
            dask.shorten_worker_interval(self.scheduler, worker, STREAM_INTERVAL_S)
            if self._events is not None:
                self._events.engine_joined(report.engine)

    def engine_lost(self, worker: str, report: workers.EngineLostReport) -> None:
        """The engine died under a living worker."""
        if self._registry.engines.pop(report.engine_id, None) is not None and self._events is not None:
            self._events.engine_died(report.engine_id, report.reason)

    def engine_start_failed(self, worker: str, report: workers.EngineStartFailedReport) -> None:
        """An engine did not start: a driver that waits for capacity reads it there."""
        self._start_failed(worker, report.reason)

    def engine_worker(self, worker: str, report: workers.EngineWorkerReport) -> None:
        """A worker waits for an order, or asks for GPUs for its own engine."""
        if report.wants is None:
            self._deployment.worker_waits(worker, report)
        else:
            self._seats.worker_asks(worker, report)

    def host_ready(self, worker: str, report: workers.HostReadyReport) -> None:
        """A worker takes actions."""
        if worker in self._drains:
            return
        if self._registry.add_host(worker, report.host):
            dask.shorten_worker_interval(self.scheduler, worker, STREAM_INTERVAL_S)
            if self._events is not None:
                self._events.host_joined(report.host)

    def host_lost(self, worker: str, report: workers.HostLostReport) -> None:
        """A worker takes no actions any more."""
        if self._registry.hosts.pop(report.host_id, None) is not None and self._events is not None:
            self._events.host_lost(report.host_id)

    def _start_failed(self, worker: str, reason: str) -> None:
        self._registry.start_failures[worker] = reason

    def payload_wanted(self, worker: str, report: workers.ActionPayloadWantedReport) -> None:
        """An action on `worker` waits for what the driver has kept."""
        if self.session is not None and self.session.session_id == report.session:
            self.session.notify(driver.ActionPayloadWantedNotice(report.action_id, worker))

    async def _host_engine(self, worker: str, spec: Mapping[str, Any] | None) -> None:
        await ask_worker(self.scheduler, worker, workers.HostEngine(spec))

    def _retire(self, worker: str) -> None:
        """The engine of this worker ends on purpose: an event for the controller, and no notice for the driver."""
        self._registry.start_failures.pop(worker, None)
        for engine_id, (address, _) in list(self._registry.engines.items()):
            if address == worker:
                del self._registry.engines[engine_id]
                if self._events is not None:
                    reason = "its worker changes TP degree"
                    self._events.engine_left(engine_id, reason, stranded=False)
