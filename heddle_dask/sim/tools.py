"""Hosts of CPUs in virtual time: an action runs as long as its true profile says for the units that it has.

One that may use CPUs which others leave idle shares them with its like, by their priorities; what it takes of a CPU
that another action has, that one runs longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from heddle_dask.core.commands import RunAction
from heddle_dask.core.events import ActionFinished
from heddle_dask.core.ids import ActionId, HostId, TrajectoryId
from heddle_dask.core.resources import CPUS
from heddle_dask.sim.fleet import FAILED_TOOL_SHARE
from heddle_dask.sim.loop import VirtualTime
from heddle_dask.sim.program import SimulatedCall
from heddle_dask.sim.shared_cpus import SharedJob, SharedNode

_RESOLUTION_S = 1e-3


@dataclass(slots=True, eq=False)
class _Running:
    """An action on its host."""

    call: SimulatedCall
    host_id: HostId
    run_s: float
    cause: str
    cpus: int = 0  # that are its alone
    lost_s: float = 0.0  # `SharedNode.lost_s` when it began, and what it has made up for since
    shared: SharedJob | None = None  # what it does with CPUs that it shares
    over: bool = False


class SimulatedTools:
    """Runs actions on hosts that may be lost.

    Parameters
    ----------
    ended
        Called with the event of each action that has ended or was aborted, and its call.
    cpus
        CPUs of each host.
    sandbox_start_s
        Seconds to start a sandbox; the first action of a sandbox on a host waits for it, with its units.
    """

    def __init__(
        self,
        time: VirtualTime,
        fails: Callable[[ActionId], bool],
        ended: Callable[[ActionFinished, SimulatedCall], None],
        cpus: Mapping[HostId, int] = MappingProxyType({}),
        sandbox_start_s: float = 0.0,
    ) -> None:
        self._nodes = {host_id: SharedNode(number, time) for host_id, number in cpus.items()}
        self._time = time
        self._fails = fails
        self._ended = ended
        self._sandbox_start_s = sandbox_start_s
        self._running: dict[ActionId, _Running] = {}
        # The host on which the sandbox of a trajectory is.
        self._sandboxes: dict[TrajectoryId, HostId] = {}

    def run(self, command: RunAction, call: SimulatedCall) -> None:
        units = command.resources[call.request.demand.elastic or CPUS]
        seconds, cause = call.work.profile.seconds(units), ""
        if self._fails(call.action_id):
            seconds, cause = FAILED_TOOL_SHARE * seconds, "raised"
        seconds += self._start_s(command.host_id, call)
        limit_s = call.work.timeout_s
        if limit_s is not None and seconds > limit_s:
            seconds, cause = limit_s, "timeout"
        call.begun_s, call.units = self._time.now_s, units
        running = _Running(call, command.host_id, seconds, cause)
        self._running[call.action_id] = running
        if command.reach_cpus and not cause:
            self._share(running, command.reach_cpus, command.nice, limit_s)
            return
        node = self._nodes.get(command.host_id)
        if node is not None:
            running.cpus = command.cpus
            node.take(command.cpus)
            running.lost_s = node.lost_until_now_s()
        self._time.after(seconds, self._end_alone if running.cpus and not cause else self._end, running)

    def _end_alone(self, running: _Running) -> None:
        """End an action with CPUs of its own, once it has made up for what others have taken of them."""
        lost_s = 0.0 if running.over else self._nodes[running.host_id].lost_until_now_s() - running.lost_s
        if lost_s > _RESOLUTION_S:
            running.lost_s += lost_s
            running.run_s += lost_s
            self._time.after(lost_s, self._end_alone, running)
        else:
            self._end(running)

    def _share(self, running: _Running, reach_cpus: int, nice: int, limit_s: float | None) -> None:
        """Run an action on its share of the CPUs that no other has alone: at least its own."""
        profile = running.call.work.profile
        late_s = running.run_s - profile.seconds(running.call.units)
        job = SharedJob(float(reach_cpus), profile, self._end, (running,), nice)
        self._time.after(late_s, self._begin_sharing, running, job)
        if limit_s is not None:
            self._time.after(limit_s, self._time_out, running)

    def _begin_sharing(self, running: _Running, job: SharedJob) -> None:
        if not running.over:
            running.shared = job
            self._nodes[running.host_id].add(job)

    def _time_out(self, running: _Running) -> None:
        if not running.over:
            running.run_s, running.cause = self._time.now_s - running.call.begun_s, "timeout"
            self._end(running)

    def _start_s(self, host_id: HostId, call: SimulatedCall) -> float:
        """Seconds until the sandbox of the call is there."""
        if not call.work.in_sandbox or self._sandboxes.get(call.trajectory_id) == host_id:
            return 0.0
        self._sandboxes[call.trajectory_id] = host_id
        return self._sandbox_start_s

    def abort(self, action_id: ActionId) -> None:
        """End a running action now; it reports what it ran. Without effect on one that has ended or was lost."""
        running = self._running.get(action_id)
        if running is not None and not running.over:
            running.run_s, running.cause = self._time.now_s - running.call.begun_s, "aborted"
            self._time.after(0.0, self._end, running)

    def lose(self, host_id: HostId) -> None:
        """Lose a host: its actions never report, and its sandboxes are gone."""
        if host_id in self._nodes:
            self._nodes.pop(host_id).stop()
        for action_id, running in list(self._running.items()):
            if running.host_id == host_id:
                running.over = True
                del self._running[action_id]
        self._sandboxes = {name: where for name, where in self._sandboxes.items() if where != host_id}

    def trajectory_ended(self, trajectory_id: TrajectoryId) -> None:
        self._sandboxes.pop(trajectory_id, None)

    def _end(self, running: _Running) -> None:
        if running.over:
            return
        running.over = True
        call = running.call
        del self._running[call.action_id]
        if running.shared is not None:
            self._nodes[running.host_id].remove(running.shared)
            running.run_s = self._time.now_s - call.begun_s
        elif running.cpus:
            self._nodes[running.host_id].take(-running.cpus)
        call.run_s, call.cause = running.run_s, running.cause
        event = ActionFinished(
            self._time.now_s,
            call.action_id,
            running.host_id,
            running.run_s,
            ok=not running.cause,
            cause=running.cause,
        )
        self._ended(event, call)
