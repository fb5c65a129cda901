"""One pod per trajectory on Kubernetes: what ARL-Tangram's coding workload is compared with (section 6.1).

A pod has a request, by which the scheduler packs pods on nodes, and a limit, beyond which it gets no CPU. It is made
when its trajectory first needs it, and deleted with its trajectory. Between them the control plane starts so many pods
per second. Commands are sent into the pod; all commands of a node share its CPUs (`shared_cpus`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.opponents.pod_settings import PodSettings
from heddle_dask.core.commands import RunAction
from heddle_dask.core.events import ActionFinished
from heddle_dask.core.ids import ActionId, HostId, TrajectoryId
from heddle_dask.core.resources import CPUS
from heddle_dask.sim.loop import VirtualTime
from heddle_dask.sim.program import SimulatedCall
from heddle_dask.sim.shared_cpus import SharedJob, SharedNode


@dataclass(slots=True, eq=False)
class _Pod:
    """The pod of a trajectory; `node` is set once it is bound."""

    trajectory_id: TrajectoryId
    asked_s: float
    calls: list[_PodCall] = field(default_factory=list)
    node: int | None = None
    running: bool = False
    tries: int = 1
    deleted: bool = False


@dataclass(slots=True, eq=False)
class _PodCall:
    """A command that runs in a pod, or waits for it; `began_s` is when it came, and `job` is set while it runs."""

    call: SimulatedCall
    host_id: HostId
    began_s: float
    pod: _Pod
    job: SharedJob | None = None
    over: bool = False


class SimulatedPods:
    """Runs the actions of trajectories in their pods. The controller grants nothing: its host has no limit.

    Parameters
    ----------
    ended
        Called with the event of each action that has ended or was aborted, and its call.
    """

    def __init__(
        self,
        settings: PodSettings,
        time: VirtualTime,
        ended: Callable[[ActionFinished, SimulatedCall], None],
    ) -> None:
        self.settings = settings
        self.nodes: Sequence[SharedNode] = [SharedNode(cpus, time) for cpus in settings.nodes]
        self._time = time
        self._ended = ended
        self._free = [float(cpus) for cpus in settings.nodes]
        self._pods: dict[TrajectoryId, _Pod] = {}
        self._unbound: deque[_Pod] = deque()
        self._calls: dict[ActionId, _PodCall] = {}
        self._binder_free_s = 0.0
        self._sender_free_s = 0.0

    def run(self, command: RunAction, call: SimulatedCall) -> None:
        """Send a command into the trajectory's pod, which is made first if it is not there."""
        pod = self._pods.get(call.trajectory_id)
        if pod is None:
            pod = self._pods[call.trajectory_id] = _Pod(call.trajectory_id, self._time.now_s)
            self._unbound.append(pod)
        running = _PodCall(call, command.host_id, self._time.now_s, pod)
        self._calls[call.action_id] = running
        if pod.running:
            self._enter(running)
        else:
            pod.calls.append(running)
            self._bind()

    def abort(self, action_id: ActionId) -> None:
        """End a command now; it reports what it ran."""
        running = self._calls.get(action_id)
        if running is not None:
            self._time.after(0.0, self._stop, running, "aborted")

    def trajectory_ended(self, trajectory_id: TrajectoryId) -> None:
        """Delete the pod of a trajectory: another one gets its room."""
        pod = self._pods.pop(trajectory_id, None)
        if pod is None:
            return
        pod.deleted = True
        if pod.node is not None:
            self._free[pod.node] += self.settings.request_cpus
        self._bind()

    def _bind(self) -> None:
        """Bind pods to nodes in order, each to the node with most room, as far as there is room."""
        while self._unbound:
            if self._unbound[0].deleted:
                self._unbound.popleft()
                continue
            number = max(range(len(self._free)), key=lambda node: (self._free[node], -node))
            if self._free[number] < self.settings.request_cpus:
                return
            pod = self._unbound.popleft()
            pod.node = number
            self._free[number] -= self.settings.request_cpus
            self._binder_free_s = self._after_queue(self._binder_free_s, self.settings.starts_per_s)
            ready_s = self._binder_free_s + self.settings.start_s
            limit_s = self.settings.start_timeout_s
            if limit_s and ready_s - pod.asked_s > limit_s:
                self._time.at(pod.asked_s + limit_s, self._start_again, pod)
            else:
                self._time.at(ready_s, self._started, pod)

    def _start_again(self, pod: _Pod) -> None:
        """The pod did not run in time: delete it and make another, or let its calls fail."""
        if pod.deleted:
            return
        assert pod.node is not None
        self._free[pod.node] += self.settings.request_cpus
        pod.node = None
        pod.asked_s = self._time.now_s
        pod.tries += 1
        if pod.tries > self.settings.start_tries:
            del self._pods[pod.trajectory_id]
            pod.deleted = True
            for running in pod.calls:
                self._stop(running, "start")
        else:
            self._unbound.append(pod)
        self._bind()

    def _started(self, pod: _Pod) -> None:
        pod.running = True
        for running in pod.calls:
            if not running.over:
                self._enter(running)
        pod.calls.clear()

    def _enter(self, running: _PodCall) -> None:
        self._sender_free_s = self._after_queue(self._sender_free_s, self.settings.execs_per_s)
        self._time.at(self._sender_free_s + self.settings.exec_s, self._begin, running)

    def _after_queue(self, free_s: float, per_s: float) -> float:
        """When a queue that is free at `free_s` and serves so many per second has served one more."""
        return max(free_s, self._time.now_s) + (1 / per_s if per_s else 0.0)

    def _begin(self, running: _PodCall) -> None:
        if running.over or running.pod.deleted:
            return
        call, pod = running.call, running.pod
        assert pod.node is not None
        call.begun_s = self._time.now_s
        most = call.work.demand[CPUS].most or 1
        cap = min(self.settings.limit_cpus, float(most))
        call.units = max(1, int(cap))
        running.job = SharedJob(cap, call.work.profile, self._stop, (running, ""))
        self.nodes[pod.node].add(running.job)
        limit_s = call.work.timeout_s
        if limit_s is not None:
            self._time.after(limit_s, self._stop, running, "timeout")

    def _stop(self, running: _PodCall, cause: str) -> None:
        if running.over:
            return
        running.over = True
        call, pod = running.call, running.pod
        del self._calls[call.action_id]
        if running.job is not None and pod.node is not None:
            self.nodes[pod.node].remove(running.job)
        began_s = call.begun_s if running.job is not None else running.began_s
        call.run_s, call.cause = self._time.now_s - began_s, cause
        event = ActionFinished(self._time.now_s, call.action_id, running.host_id, call.run_s, ok=not cause, cause=cause)
        self._ended(event, call)
