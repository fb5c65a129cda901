"""Carries out the controller's commands on Dask tasks, workers and the driver. It never changes or drops one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, assert_never

from distributed import Scheduler

from heddle_dask.core import commands as cmd
from heddle_dask.core.priority import NORMAL
from heddle_dask.live.scheduler.degree_planning import DegreePlanning
from heddle_dask.live.scheduler.engine_registry import Places
from heddle_dask.live.scheduler.session import Session
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.messages import SLOT_RESOURCE, TOOL_RESOURCE, Key, action_key, step_key


class Dispatcher:
    """The hands of one session.

    Parameters
    ----------
    action_ended
        Takes the end of an action that nobody waits for any more, as a tool worker would tell it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        session: Session,
        places: Places,
        degrees: DegreePlanning,
        action_ended: Callable[..., None],
    ) -> None:
        self._scheduler = scheduler
        self._session = session
        self._places = places
        self._degrees = degrees
        self._action_ended = action_ended

    def carry_out(self, command: cmd.Command) -> None:
        """Do what the command says, now or at the next turn of the loop."""
        match command:
            case cmd.StartStep():
                self._start_step(command)
            case cmd.PredictRemaining():
                self._session.predict(command.trajectory_id)
            case cmd.MoveContext():
                self._move(command)
            case cmd.DropContext():
                self._drop(command)
            case cmd.RunAction():
                self._run_action(command)
            case cmd.AdmitTrajectory():
                self._session.notify("admitted", command.trajectory_id)
            case cmd.AbortStep():
                self._abort(self._places.sources.get(command.engine_id), self._key_of(command))
            case cmd.AbortAction():
                address, _ = self._places.hosts[command.host_id]
                self._abort(address, action_key(self._session.session_id, command.action_id))
            case cmd.GiveUpStep():
                self._session.held.pop(self._key_of(command), None)
                self._session.notify(
                    "step-given-up",
                    list(command.step_id),
                    command.cause,
                )
            case cmd.GiveUpAction():
                self._session.held.pop(action_key(self._session.session_id, command.action_id), None)
                self._session.notify("action-given-up", command.action_id, command.cause)
            case cmd.PlanDegrees():
                self._degrees.plan(command)
            case cmd.DeployEngines():
                self._degrees.deploy(command)
            case _:
                assert_never(command)

    def _key_of(self, command: cmd.StartStep | cmd.AbortStep | cmd.GiveUpStep) -> Key:
        return step_key(self._session.session_id, command.step_id)

    def _start_step(self, command: cmd.StartStep) -> None:
        address, spec = self._places.engines[command.engine_id]
        source = command.source_engine_id
        self._dispatch(
            self._key_of(command),
            address,
            {} if command.bypass_queue else {SLOT_RESOURCE: 1},
            dask.dask_priority(command.priority, command.order),
            {
                "engine": spec.engine_id,
                "priority": command.priority.number,
                "source": self._places.sources.get(source) if source is not None else None,
            },
        )

    def _run_action(self, command: cmd.RunAction) -> None:
        key = action_key(self._session.session_id, command.action_id)
        address, _ = self._places.hosts[command.host_id]
        given = {"host": command.host_id, "cpus": command.cpus}
        there = self._dispatch(
            key, address, {TOOL_RESOURCE: command.cpus}, dask.dask_priority(NORMAL, 0), given
        )
        if not there:
            # Its program has stopped waiting: the CPUs are free again, told at the next turn of the loop.
            ended = (address, self._session.session_id, command.action_id, command.host_id, 0.0, False, False)
            self._scheduler.loop.add_callback(self._action_ended, *ended)

    def _dispatch(
        self,
        key: Key,
        address: str,
        resources: Mapping[str, float],
        priority: tuple[float, float, int],
        annotation: Mapping[str, Any],
    ) -> bool:
        """False: there is no such task any more."""
        ts = self._scheduler.tasks.get(key)
        self._session.held.pop(key, None)
        if ts is None:
            return False  # the driver cancelled it meanwhile, and says so of a step
        dask.pin(ts, address, resources, priority, annotation)
        if ts.state == "no-worker":
            # Never from inside a transition or another submission: the next turn of the loop does it.
            self._scheduler.loop.add_callback(
                dask.release, self._scheduler, (key,), f"heddle-release-{key[2]}"
            )
        return True

    def _move(self, command: cmd.MoveContext) -> None:
        """Tell the target's worker; one whose worker is gone is reported by the loss of its engine."""
        message = {
            "op": "heddle-move",
            "session": self._session.session_id,
            "trajectory": command.trajectory_id,
            "source": self._places.sources.get(command.source_engine_id, ""),
            "source_engine_id": command.source_engine_id,
            "engine_id": command.target_engine_id,
            "kind": command.kind,
        }
        dask.send_to_worker(self._scheduler, self._places.sources[command.target_engine_id], message)

    def _drop(self, command: cmd.DropContext) -> None:
        """Tell the engine's worker; one that is gone has taken the context with it."""
        address = self._places.sources.get(command.engine_id)
        if address is not None:
            message = {
                "op": "heddle-forget",
                "session": self._session.session_id,
                "trajectory": command.trajectory_id,
            }
            dask.send_to_worker(self._scheduler, address, message)

    def _abort(self, address: str | None, key: Key) -> None:
        if address is not None:
            dask.send_to_worker(self._scheduler, address, {"op": "heddle-abort", "key": list(key)})
