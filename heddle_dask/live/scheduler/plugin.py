"""The plugin in the Dask scheduler: turns hooks and messages into events; `Dispatcher` carries out the commands.

Thin on purpose. It decides nothing: which engine, in which order, with how many CPUs, all comes from the
controller of the session. Dask swallows what a hook raises; therefore every hook is wrapped, the first
failure is latched in the session, no further command is issued, and the driver raises it at the client.
"""

from __future__ import annotations

import asyncio
import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import ActionId, EngineId, HostId, StepId, TrajectoryId
from heddle_dask.core.nouns import (
    ActionRequest,
    EngineDescription,
    HostDescription,
    StepRequest,
    TrajectorySpec,
)
from heddle_dask.core.retries import RetryPolicy
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.live.scheduler.degree_planning import DegreePlanning
from heddle_dask.live.scheduler.deployment import EngineDeployment
from heddle_dask.live.scheduler.dispatcher import Dispatcher
from heddle_dask.live.scheduler.engine_registry import Places
from heddle_dask.live.scheduler.predictions import Predictions
from heddle_dask.live.scheduler.session import Session
from heddle_dask.live.scheduler.warm_start import warm_predictor
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.messages import (
    ACTION_PREFIX,
    ENGINE_RESOURCE,
    STEP_PREFIX,
    STREAM_INTERVAL_S,
    TOOL_RESOURCE,
    Key,
    StepEnd,
    step_key,
)
from heddle_dask.predictors.chosen import build_predictor
from heddle_dask.predictors.known import KnownWork
from heddle_dask.strategies.presets import strategies_of_run

PLUGIN_NAME = "heddle"

F = TypeVar("F", bound=Callable[..., Any])


def guarded(hook: F) -> F:
    """Latch what a hook raises: Dask would log it and go on with a cluster that nobody steers."""

    @functools.wraps(hook)
    def wrapped(self: HeddleScheduler, *args: Any, **kwargs: Any) -> Any:
        if self.session is None or self.session.failure is not None:
            return None
        try:
            return hook(self, *args, **kwargs)
        except Exception:
            self.session.latch(traceback.format_exc())
            return None

    return wrapped  # type: ignore[return-value]


class HeddleScheduler(SchedulerPlugin):
    """Steers the steps and actions of one session at a time.

    Register with ``client.register_plugin(HeddleScheduler())`` or by ``--preload workers.scheduler``;
    a second registration changes nothing.
    """

    name = PLUGIN_NAME
    idempotent = True

    def __init__(self) -> None:
        self.session: Session | None = None
        self._places = Places()
        self._deployment = EngineDeployment(self._tell_engine, self._retire)

    async def start(self, scheduler: Scheduler) -> None:
        """Add our RPC and stream handlers."""
        self.scheduler = scheduler
        collect_seldom()
        dask.add_handlers(
            scheduler,
            rpc={
                "heddle_open": self.open_session,
                "heddle_submit": self.submit,
                "heddle_updates": self.updates,
                "heddle_close": self.close_session,
                "heddle_capacity": self.capacity,
                "heddle_deployment": self._deployment.report,
                "heddle_clear_engines": self._deployment.clear,
                "heddle_provide_engines": self.provide_engines,
            },
            stream={
                "heddle-ended": self.on_trajectories_ended,
                "heddle-step-cancelled": self.on_step_cancelled,
                "heddle-seat": self._deployment.on_worker,
                "heddle-engine-ready": self.on_engine_ready,
                "heddle-engine-lost": self.on_engine_lost,
                "heddle-engine-trouble": self.on_engine_trouble,
                "heddle-host-ready": self.on_host_ready,
                "heddle-host-lost": self.on_host_lost,
                "heddle-step-started": self.on_step_started,
                "heddle-step-ended": self.on_step_ended,
                "heddle-action-ended": self.on_action_ended,
                "heddle-move-ended": self.on_move_ended,
            },
        )

    # -- the driver's RPCs -------------------------------------------------------------------------

    async def open_session(
        self,
        session: str,
        client_id: str,
        preset: str,
        overrides: Sequence[str],
        seed: int,
        cost: Mapping[str, Any] | None = None,
        retries: Mapping[str, int] | None = None,
    ) -> Mapping[str, Any]:
        """Start a session with its own controller; refuses while another client's session is open."""
        known = KnownWork()
        predictor = None
        try:
            self._check_free()
            policy = RetryPolicy.from_mapping(retries or {})
            strategies = strategies_of_run(
                {"strategy": preset, "overrides": overrides, "seed": seed, "cost": cost}
            )
            if strategies.predictor is not None:
                # It imports XGBoost and may read a file: seconds.
                predictor = await asyncio.to_thread(
                    build_predictor, strategies.predictor, known, warm_predictor
                )
                self._check_free()
        except BadInput as error:
            return {"error": str(error)}
        if self.session is not None:
            self.session.close()
        self.session = Session(session, client_id, Controller(strategies, policy))
        if predictor is not None:
            answer = functools.partial(self.on_prediction, session)
            self.session.predictions = Predictions(
                predictor, known, answer, self.session.latch, self.session.now
            )
        self._degrees = DegreePlanning(
            self.session, self._deployment, predictor, functools.partial(self.on_degrees, session)
        )
        self.session.degrees = self._degrees
        self._dispatcher = Dispatcher(
            self.scheduler, self.session, self._places, self._degrees, self.on_action_ended
        )
        dask.shorten_client_report_interval(self.scheduler, client_id, STREAM_INTERVAL_S)
        for _, engine in self._places.engines.values():
            self._feed(ev.EngineJoined(self.session.now(), engine))
        for _, host in self._places.hosts.values():
            self._feed(ev.HostJoined(self.session.now(), host))
        return {"capacity": await self.capacity()}

    def _check_free(self) -> None:
        if self.session is not None and self.session.client_id in self.scheduler.clients:
            raise BadInput(
                f"this cluster already runs heddle session {self.session.session_id} of "
                f"{self.session.client_id}; close it, or use another cluster"
            )

    async def capacity(self) -> Mapping[str, Any]:
        """Engines that answer, tool CPUs, workers by tag, and the latest trouble of each engine."""
        workers = [set(state.resources) for state in self.scheduler.workers.values()]
        return {
            **self._places.capacity(),
            "plugins": list(self.scheduler.worker_plugins),
            "workers": len(workers),
            "engine_workers": sum(ENGINE_RESOURCE in tags for tags in workers),
            "tool_workers": sum(TOOL_RESOURCE in tags for tags in workers),
        }

    async def submit(self, session: str, trajectories: Sequence[Sequence[Any]]) -> Mapping[str, Any]:
        """Announce trajectories; each is admitted by a notice."""
        self._submit(session, trajectories)
        return {}

    @guarded
    def _submit(self, session: str, trajectories: Sequence[Sequence[Any]]) -> None:
        live = self._session(session)
        for row in trajectories:
            *facts, tokens, tools_s, observed_tokens = row
            if live.predictions is not None:
                live.predictions.know(facts[0], tokens, tools_s, observed_tokens)
            self._feed(ev.TrajectorySubmitted(live.now(), TrajectorySpec(*facts)))

    async def provide_engines(self, session: str, **batch: Any) -> Mapping[str, Any]:
        """Have the controller decide on the TP degrees for a batch, and deploy its engines (`DegreePlanning`)."""
        self._session(session)
        try:
            return await self._degrees.provide(**batch)
        except BadInput as error:
            return {"error": str(error)}

    @guarded
    def on_degrees(self, session: str, event: ev.DegreesRequested | ev.DegreesPlanned) -> None:
        """A batch is about to start, or its TP degrees have been searched."""
        if self._session_is(session):
            assert self.session is not None
            self._feed(replace(event, at=self.session.now()))

    async def updates(self, session: str, wait_s: float) -> Mapping[str, Any]:
        """Long poll of the driver: notices, journal lines, counts, and the latched failure if any."""
        return await self._session(session).updates(wait_s)

    async def close_session(self, session: str) -> Mapping[str, Any]:
        """End the session once it has come to rest; answers with its last updates."""
        closing = self.session
        if closing is None or closing.session_id != session:
            return {}
        await closing.come_to_rest()
        last = await closing.updates(0)
        closing.close()
        if self.session is closing:
            self.session = None
        return last

    def _session(self, session_id: str) -> Session:
        if self.session is None or self.session.session_id != session_id:
            raise RuntimeError(f"heddle session {session_id} is not open on this scheduler")
        return self.session

    # -- Dask's hooks ------------------------------------------------------------------------------

    @guarded
    def update_graph(
        self,
        scheduler: Scheduler,
        *,
        client: str,
        keys: set[Any],
        annotations: Mapping[str, Mapping[Any, Any]],
        priority: Mapping[Any, Any],
        **kwargs: Any,
    ) -> None:
        """Place the steps and actions of a submission, before Dask's first transition of them."""
        requests = annotations.get("heddle")
        if not requests or self.session is None:
            return
        at = self.session.now()
        # Dask collects annotations in a set: only the priorities still know the order of submission.
        mine = [key for key in requests if key[1] == self.session.session_id]
        for key in sorted(mine, key=priority.__getitem__):
            dask.hold(scheduler.tasks[key])
            self.session.held[key] = None
            request, news = requests[key]
            self._hear_of(news)
            if key[0] == STEP_PREFIX:
                step_id, *sizes = request
                self._feed(ev.StepRequested(at, StepRequest(StepId(*step_id), *sizes)))
            elif key[0] == ACTION_PREFIX:
                self._feed(ev.ActionRequested(at, ActionRequest(*request)))

    def _hear_of(self, news: StepEnd | None) -> None:
        """The driver has the result of a step: unless its worker was first to tell, the step has ended now."""
        if news is None:
            return
        assert self.session is not None
        step_id, facts = StepId(*news[0]), news[1]
        if not self.session.controller.awaits(step_id):
            return
        self._feed(ev.StepDelivered(self.session.now(), step_id, **facts))
        # Its task is held if its worker died between the answer to the driver and the report to the scheduler.
        self.session.return_unawaited([step_key(self.session.session_id, step_id)])

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """A worker left or died: its engine and its host are lost with all that ran there."""
        self._deployment.forget_worker(worker)
        engines, hosts = self._places.forget_worker(worker)
        for engine_id in engines:
            self._lost(ev.EngineLost, engine_id, reason="its worker left", stranded=True)
        for host_id in hosts:
            self._lost(ev.HostLost, host_id)

    @guarded
    def _lost(self, kind: Callable[..., ev.Event], *ids: Any, **facts: Any) -> None:
        assert self.session is not None
        reclaimed = self._reclaim_stranded()
        self._feed(kind(self.session.now(), *ids, **facts))
        self.session.return_unawaited(reclaimed)

    def _reclaim_stranded(self) -> list[Key]:
        """Hold our tasks that Dask sent back to "no-worker" because their worker died."""
        assert self.session is not None
        reclaimed: list[Key] = []
        for ts in list(self.scheduler.unrunnable):
            key: Any = ts.key
            if not isinstance(key, tuple) or len(key) != 5 or key[1] != self.session.session_id:
                continue
            if key not in self.session.held:
                dask.forgive(ts)
                dask.hold(ts)
                self.session.held[key] = None
                reclaimed.append(key)
        return reclaimed

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """A driver that has gone takes its session with it."""
        if self.session is not None and self.session.client_id == client:
            self.session.close()
            self.session = None

    # -- messages of workers and driver ------------------------------------------------------------

    def on_engine_ready(
        self, worker: str, engine: Sequence[Any], model: Sequence[str], start_s: float = 0.0
    ) -> None:
        """An engine on `worker` answers; a new incarnation gets a new id. `model`: kind and directory."""
        spec = EngineDescription(*engine)
        self._deployment.started(spec.tp_degree, start_s)
        if self._places.add_engine(worker, spec, model):
            dask.shorten_worker_interval(self.scheduler, worker, STREAM_INTERVAL_S)
            self._joined(ev.EngineJoined, spec)

    def on_host_ready(self, worker: str, host: Sequence[Any]) -> None:
        """A worker takes actions."""
        spec = HostDescription(*host)
        if self._places.add_host(worker, spec):
            dask.shorten_worker_interval(self.scheduler, worker, STREAM_INTERVAL_S)
            self._joined(ev.HostJoined, spec)

    @guarded
    def _joined(self, kind: Callable[..., ev.Event], spec: Any) -> None:
        assert self.session is not None
        self._feed(kind(self.session.now(), spec))

    def on_host_lost(self, worker: str, host_id: HostId) -> None:
        """A worker takes no actions any more."""
        if self._places.hosts.pop(host_id, None) is not None:
            self._lost(ev.HostLost, host_id)

    def on_engine_lost(self, worker: str, engine_id: EngineId, reason: str) -> None:
        """The engine died under a living worker: each of its steps reports by itself."""
        if self._places.engines.pop(engine_id, None) is not None:
            self._lost_engine(engine_id, reason)

    @guarded
    def _lost_engine(self, engine_id: EngineId, reason: str) -> None:
        assert self.session is not None
        self.session.notify("engine-lost", engine_id, reason)
        self._feed(ev.EngineLost(self.session.now(), engine_id, reason, stranded=False))

    def _retire(self, worker: str) -> None:
        """The engine of this worker ends on purpose: a fact for the controller, and no news for the driver."""
        self._places.trouble.pop(worker, None)
        for engine_id, (address, _) in list(self._places.engines.items()):
            if address == worker:
                del self._places.engines[engine_id]
                self._lost(ev.EngineLost, engine_id, reason="its worker changes TP degree", stranded=False)

    async def _tell_engine(self, worker: str, spec: Mapping[str, Any] | None) -> None:
        await self.scheduler.rpc(worker).heddle_seat(spec=spec)

    def on_engine_trouble(self, worker: str, message: str) -> None:
        """An engine did not start; told to drivers that wait for capacity."""
        self._places.trouble[worker] = message

    @guarded
    def on_step_started(self, worker: str, session: str, step_id: Sequence[Any], engine_id: EngineId) -> None:
        """The step holds a slot of that engine."""
        if self._session_is(session):
            assert self.session is not None
            self._feed(ev.StepStarted(self.session.now(), StepId(*step_id), engine_id))

    @guarded
    def on_step_ended(self, worker: str, session: str, step_id: Sequence[Any], **facts: Any) -> None:
        """Comes before Dask's own message that the task is done, on the same stream."""
        if not self._session_is(session):
            return
        assert self.session is not None
        at = self.session.now()
        kind = ev.StepFailed if "cause" in facts else ev.StepFinished
        self._feed(kind(at, StepId(*step_id), **facts))

    @guarded
    def on_action_ended(
        self,
        worker: str,
        session: str,
        action_id: ActionId,
        host_id: HostId,
        run_s: float,
        ok: bool,
        ran: bool = True,
    ) -> None:
        """An action ended on its host, well or not, or was called off before it could start."""
        if self._session_is(session):
            assert self.session is not None
            self._feed(ev.ActionFinished(self.session.now(), action_id, host_id, run_s, ok, ran))

    @guarded
    def on_prediction(self, session: str, event: ev.PredictionMade) -> None:
        """The predictor has answered."""
        if self._session_is(session):
            assert self.session is not None
            self._feed(replace(event, at=self.session.now()))

    @guarded
    def on_move_ended(
        self, worker: str, session: str, trajectory: TrajectoryId, engine_id: EngineId, ok: bool, **facts: Any
    ) -> None:
        """A context has arrived at its new worker, or will not."""
        if self._session_is(session):
            assert self.session is not None
            self._feed(ev.MoveEnded(self.session.now(), trajectory, engine_id, ok, **facts))

    @guarded
    def on_step_cancelled(self, client: str, session: str, step_id: Sequence[Any]) -> None:
        """The program of a trajectory does not wait for this step any more."""
        if self._session_is(session):
            assert self.session is not None
            cancelled = StepId(*step_id)
            self.session.held.pop(step_key(session, cancelled), None)
            self._feed(ev.StepCancelled(self.session.now(), cancelled))

    @guarded
    def on_trajectories_ended(
        self, client: str, session: str, ended: Sequence[tuple[TrajectoryId, str, StepEnd | None]]
    ) -> None:
        """The driver ended trajectories."""
        if not self._session_is(session):
            return
        assert self.session is not None
        for trajectory_id, status, news in ended:
            self._hear_of(news)
            known = self.session.controller.state.trajectories.get(trajectory_id)
            if known is not None and self.session.predictions is not None:
                self.session.predictions.ended(known, status)
            self._feed(ev.TrajectoryEnded(self.session.now(), trajectory_id, status))

    def _session_is(self, session_id: str) -> bool:
        return self.session is not None and self.session.session_id == session_id

    def _feed(self, event: ev.Event) -> None:
        assert self.session is not None
        for command in self.session.handle(event):
            self._dispatcher.carry_out(command)
