"""The part of a history about actions and the hosts that run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.ids import ActionId, TrajectoryId
from heddle_dask.core.resources import api_of
from heddle_dask.views.history.bounded import FailureTally
from heddle_dask.views.history.lanes import HostRow, Lane, OpenAction
from heddle_dask.views.history.phases import DRIVER, QUOTA, REWARD, SERVICE_LOAD, TOOL, TOOL_QUEUE

MOST_LABELS: Final = 30
OTHER_LABEL: Final = "other"


@dataclass(slots=True)
class LabelCounts:
    finished: int = 0
    failed: int = 0
    run_s: float = 0.0


class ActionHistory:
    """Actions and hosts.

    Attributes
    ----------
    loading
        Model services that are being loaded, by host, first GPU and number of GPUs.
    labels
        Totals by kind and label; labels beyond the first `MOST_LABELS` are counted as ``other``.
    """

    def __init__(
        self,
        lanes: Mapping[TrajectoryId, Lane],
        enter: Callable[[Lane, int, float], None],
        leave_engine: Callable[[Lane], None],
        failures: FailureTally,
    ) -> None:
        self._lanes = lanes
        self._enter = enter
        self._leave_engine = leave_engine
        self._failures = failures
        self.open: dict[ActionId, OpenAction] = {}
        self.hosts: dict[str, HostRow] = {}
        self.labels: dict[tuple[str, str], LabelCounts] = {}
        self.loading: dict[tuple[str, int, int], str] = {}

    def counted_as(self, kind: str, label: str) -> tuple[str, str]:
        """The key of `labels` for an action, which exists afterwards."""
        key = (kind, label)
        if key not in self.labels:
            if len(self.labels) >= MOST_LABELS:
                key = (kind, OTHER_LABEL)
            self.labels.setdefault(key, LabelCounts())
        return key

    def rest(self, lane: Lane, at: float) -> None:
        phase = DRIVER
        for action in lane.actions.values():
            if action.host is not None:
                phase = REWARD if action.kind == "reward" else TOOL
                break
            if phase == DRIVER:
                phase = self._waits_for(action)
        self._enter(lane, phase, at)

    def _waits_for(self, action: OpenAction) -> int:
        """The phase of a trajectory whose actions all wait, as far as this action is concerned."""
        if action.service and action.service in self.loading.values():
            return SERVICE_LOAD
        return QUOTA if action.asks_api else TOOL_QUEUE

    def service_loads(self, command: cmd.LoadService, at: float) -> None:
        self.loading[command.host_id, command.first_gpu, command.gpus] = command.service
        self._service_changed(command.service, at)

    def service_loaded(self, event: ev.ServiceLoaded) -> None:
        self.loading.pop((event.host_id, event.first_gpu, event.gpus), None)
        self._service_changed(event.service, event.at)

    def _service_changed(self, service: str, at: float) -> None:
        for action in self.open.values():
            if action.service == service and action.host is None:
                self._changed(action.lane, at)

    def requested(self, event: ev.ActionRequested) -> None:
        spec = event.action
        lane = self._lanes.get(spec.trajectory_id)
        if lane is None:
            return
        asks_api = any(api_of(name) is not None for name in spec.demand.names)
        action = OpenAction(lane, spec.label, spec.kind, spec.pool, asks_api, spec.service)
        self.open[spec.action_id] = lane.actions[spec.action_id] = action
        self.counted_as(spec.kind, spec.label)
        self._leave_engine(lane)
        if lane.step is None:
            self.rest(lane, event.at)

    def started(self, command: cmd.RunAction, at: float) -> None:
        action, host = self.open.get(command.action_id), self.hosts.get(command.host_id)
        if action is None or host is None:
            return
        action.host, action.cpus = command.host_id, command.cpus
        host.free_cpus -= command.cpus
        host.running[command.action_id] = None
        self._changed(action.lane, at)

    def finished(self, event: ev.ActionFinished) -> None:
        action = self.open.get(event.action_id)
        if action is None or action.host != event.host_id:
            return
        self._release(event.action_id, action)
        if event.ran:
            counts = self.labels[self.counted_as(action.kind, action.label)]
            counts.finished += 1
            counts.failed += not event.ok
            counts.run_s += event.run_s
            if not event.ok:
                self._failures.count("action", f"{action.kind} {action.label} failed", event.at)
        self._close(event.action_id, action, event.at)

    def cancelled(self, event: ev.ActionCancelled) -> None:
        """One that waits is over; one that runs holds its CPUs until it reports."""
        action = self.open.get(event.action_id)
        if action is None:
            return
        action.unawaited = True
        if action.host is None:
            self._close(event.action_id, action, event.at)

    def given_up(self, command: cmd.GiveUpAction, at: float) -> None:
        self._failures.count("action", command.cause, at)
        action = self.open.get(command.action_id)
        if action is not None:
            self._close(command.action_id, action, at)

    def lane_ended(self, lane: Lane) -> None:
        """Forget its waiting actions; running ones hold their CPUs until they report."""
        for action_id, action in lane.actions.items():
            if action.host is None:
                del self.open[action_id]

    def host_joined(self, event: ev.HostJoined) -> None:
        spec = event.host
        self.hosts[spec.host_id] = HostRow(spec.host_id, spec.pool, spec.cpus, spec.cpus)

    def host_lost(self, event: ev.HostLost) -> None:
        """A host is lost: its actions wait again, those that nobody waits for are over."""
        host = self.hosts.pop(event.host_id, None)
        if host is None:
            return
        for key in [key for key in self.loading if key[0] == event.host_id]:
            self._service_changed(self.loading.pop(key), event.at)
        if host.running:  # a worker also leaves and comes again when a session starts, with nothing on it
            self._failures.count("host", "tool worker lost", event.at)
        for action_id in host.running:
            action = self.open[action_id]
            action.host, action.cpus = None, 0
            if action.lane.ended_s is not None or action.unawaited:
                self._close(action_id, action, event.at)
            else:
                self._changed(action.lane, event.at)

    def _release(self, action_id: ActionId, action: OpenAction) -> None:
        host = self.hosts.get(action.host or "")
        if host is not None:
            host.free_cpus += action.cpus
            host.running.pop(action_id, None)
        action.host, action.cpus = None, 0

    def _close(self, action_id: ActionId, action: OpenAction, at: float) -> None:
        del self.open[action_id]
        action.lane.actions.pop(action_id, None)
        self._changed(action.lane, at)

    def _changed(self, lane: Lane, at: float) -> None:
        if lane.step is None and lane.ended_s is None:
            self.rest(lane, at)
