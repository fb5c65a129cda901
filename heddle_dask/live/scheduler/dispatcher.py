"""Carries out the controller's commands on Dask tasks, workers and the driver. It never changes or drops one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import assert_never

from distributed import Scheduler

from heddle_dask.core import commands as cmd
from heddle_dask.core.events import ActionFinished
from heddle_dask.core.ids import EngineId, HostId
from heddle_dask.core.nouns import NORMAL
from heddle_dask.core.run_record import plain_name
from heddle_dask.live.scheduler.degree_planning import DegreePlanning
from heddle_dask.live.scheduler.engine_registry import EngineRegistry
from heddle_dask.live.scheduler.session import Session
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.driver_messages import ApiNotice
from heddle_dask.live.wire.envelopes import UNSTAMPED, Order
from heddle_dask.live.wire.messages import (
    SLOT_RESOURCE,
    TOOL_RESOURCE,
    ActionPlacement,
    Key,
    StepPlacement,
    action_key,
    step_key,
)
from heddle_dask.live.wire.transport import send
from heddle_dask.live.wire.worker_messages import LoadServiceOrder, MoveContextOrder

_OfEngine = cmd.AbortStep | cmd.DropContext | cmd.FetchWeights | cmd.InstallWeights
_OfHost = cmd.CloseSandbox | cmd.EvictService | cmd.DropServiceCopy


class Dispatcher:
    def __init__(
        self,
        scheduler: Scheduler,
        session: Session,
        registry: EngineRegistry,
        degrees: DegreePlanning,
        # Takes the end of an action that its program does not wait for any more, as a tool worker would report it.
        action_ended: Callable[[ActionFinished], None],
        released: Callable[[EngineId | HostId], None],  # takes an engine or a host that has drained
        time_reached: Callable[[float], None],  # called at the time of a `WakeUp`, with that time
    ) -> None:
        self._scheduler = scheduler
        self._session = session
        self._registry = registry
        self._degrees = degrees
        self._action_ended = action_ended
        self._released = released
        self._time_reached = time_reached

    def carry_out(self, command: cmd.Command) -> None:
        """Do what the command says, now or at the next turn of the loop."""
        session = self._session
        match command:
            case cmd.StartStep():
                self._start_step(command)
            case cmd.PredictRemaining():
                session.predict(command.trajectory_id)
            case cmd.MoveContext():
                self._move(command)
            case cmd.RunAction():
                self._run_action(command)
            case cmd.AbortStep() | cmd.DropContext():
                self._order_engine(session.session_id, command)
            case cmd.FetchWeights() | cmd.InstallWeights():
                self._order_engine("", command)
            case cmd.AbortAction():
                address, _ = self._registry.hosts[command.host_id]
                send(self._scheduler, Order(session.session_id, command), address)
            case cmd.CloseSandbox():
                self._order_host(session.session_id, command)
            case cmd.EvictService() | cmd.DropServiceCopy():
                self._order_host(session.controller_name, command)
            case cmd.LoadService():
                self._load_service(command)
            case cmd.AdmitTrajectory() | cmd.CancelTrajectory():
                session.notify(command)
            case cmd.GiveUpStep():
                session.held.pop(step_key(session.session_id, command.step_id), None)
                session.notify(command)
            case cmd.GiveUpAction():
                session.held.pop(action_key(session.session_id, command.action_id), None)
                session.notify(command)
            case cmd.ReleaseEngine():
                self._released(command.engine_id)
            case cmd.ReleaseHost():
                self._released(command.host_id)
            case cmd.ReportApi():
                session.notify(ApiNotice(command.api, command.state, self._in_s(command.until_s), command.cause))
            case cmd.WakeUp():
                self._scheduler.loop.call_later(self._in_s(command.at_s), self._time_reached, command.at_s)
            case cmd.PlanDegrees():
                self._degrees.plan(command)
            case cmd.DeployEngines():
                self._degrees.deploy(command)
            case _:
                assert_never(command)

    def close(self) -> None:
        """Have the sandboxes closed that the session leaves on its hosts: its driver may have died."""
        for place in self._session.controller.state.sandboxes.values():
            run_id, name = plain_name(place.name)
            if place.host is not None and run_id == self._session.run.run_id:
                self._order_host(self._session.session_id, cmd.CloseSandbox(place.host, name))

    def _in_s(self, at_s: float) -> float:
        return max(0.0, at_s - self._session.now())

    def _start_step(self, command: cmd.StartStep) -> None:
        address, spec = self._registry.engines[command.engine_id]
        source = command.source_engine_id
        self._dispatch(
            step_key(self._session.session_id, command.step_id),
            address,
            {} if command.bypass_queue else {SLOT_RESOURCE: 1},
            dask.dask_priority(command.priority, command.order),
            StepPlacement(
                spec.engine_id,
                command.priority.number,
                self._registry.sources.get(source) if source is not None else None,
                command.prefill_only,
            ),
        )

    def _run_action(self, command: cmd.RunAction) -> None:
        session, action_id, host_id = self._session, command.action_id, command.host_id
        session_id, action = session.session_id, session.action(action_id)
        address, _ = self._registry.hosts[host_id]
        dispatched = self._dispatch(
            action_key(session_id, action_id),
            address,
            # A host of model services has no such tag, and its requests use no CPUs.
            {TOOL_RESOURCE: command.cpus} if command.cpus else {},
            dask.dask_priority(NORMAL, 0),
            ActionPlacement(
                host_id,
                command.resources,
                command.waits.quota_s,
                command.waits.load_s,
                service="" if action is None else action.spec.service,
                first_gpu=command.first_gpu,
                gpus=command.gpus,
                reach_cpus=command.reach_cpus,
                nice=command.nice,
            ),
        )
        if not dispatched:
            # Its program has stopped waiting: the controller learns of the free CPUs at the next turn of the loop.
            ended = ActionFinished(UNSTAMPED, action_id, host_id, run_s=0.0, ok=False, ran=False)
            self._scheduler.loop.add_callback(self._action_ended, ended)

    def _dispatch(
        self,
        key: Key,
        address: str,
        resources: Mapping[str, float],
        priority: tuple[float, float, int],
        placement: StepPlacement | ActionPlacement,
    ) -> bool:
        """False: there is no such task any more."""
        ts = self._scheduler.tasks.get(key)
        self._session.held.pop(key, None)
        if ts is None:
            return False  # the driver cancelled it meanwhile, and reports that of a step
        dask.pin(ts, address, resources, priority, placement.to_wire())
        if ts.state == "no-worker":
            # Never from inside a transition or another submission: the next turn of the loop does it.
            self._scheduler.loop.add_callback(dask.release, self._scheduler, (key,), f"heddle-release-{key[2]}")
        return True

    def _move(self, command: cmd.MoveContext) -> None:
        """Send the order to the target's worker; the loss of its engine reports a worker that is gone."""
        source = self._registry.sources.get(command.source_engine_id, "")
        order = MoveContextOrder(self._session.session_id, command, source)
        send(self._scheduler, order, self._registry.sources[command.target_engine_id])

    def _load_service(self, command: cmd.LoadService) -> None:
        """Send the order to the host; the loss of a host that is gone says all about its copies."""
        session = self._session
        order = LoadServiceOrder(session.controller_name, command, session.services[command.service])
        address, _ = self._registry.hosts.get(command.host_id, ("", None))
        if address:
            send(self._scheduler, order, address)

    def _order_engine(self, session: str, command: _OfEngine) -> None:
        """Send the command to the engine's worker; with one that is gone, context and weights have gone too."""
        address = self._registry.sources.get(command.engine_id)
        if address is not None:
            send(self._scheduler, Order(session, command), address)

    def _order_host(self, session: str, command: _OfHost) -> None:
        """Send the command to the host's worker; one that is gone has taken everything with it."""
        address, _ = self._registry.hosts.get(command.host_id, ("", None))
        if address:
            send(self._scheduler, Order(session, command), address)
