"""Hosts that are told how long each test suite still runs, and set its weight by that every second.

No program can tell it: this is what weights of control groups (``cpu.weight``) could give at most. A command of one CPU
has the usual weight, a suite one that falls with its remaining seconds. What runs on a host shares its CPUs by weight,
and nothing waits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heddle_dask.core.commands import RunAction
from heddle_dask.core.events import ActionFinished
from heddle_dask.core.ids import ActionId, HostId, TrajectoryId
from heddle_dask.core.resources import CPUS
from heddle_dask.sim.loop import VirtualTime
from heddle_dask.sim.program import SimulatedCall

_PERIOD_S = 1.0
_SHORT_S = 8.0
_LEAST_S = 0.1
_RESOLUTION_S = 1e-9


@dataclass(frozen=True, slots=True)
class HostWeights:
    """The weight of a suite, over that of a command: `first` with 8 s left, in proportion to seconds left ^ -`power`.

    Attributes
    ----------
    hosts, cpus
        Number of hosts, and CPUs of each.
    """

    hosts: int
    cpus: int
    first: float
    power: float


@dataclass(slots=True, eq=False)
class _Job:
    call: SimulatedCall
    host_id: HostId
    left_s: float  # on one CPU
    cap: float
    speed: float = 0.0


class WeightedHosts:
    """Runs all actions of a trajectory on the host that had the fewest trajectories. The controller grants nothing.

    Parameters
    ----------
    ended
        Called with the event of each action that has ended, and its call.
    """

    def __init__(
        self, weights: HostWeights, time: VirtualTime, ended: Callable[[ActionFinished, SimulatedCall], None]
    ) -> None:
        self._weights = weights
        self._time = time
        self._ended = ended
        self._jobs: list[list[_Job]] = [[] for _ in range(weights.hosts)]
        self._advanced_s = [0.0] * weights.hosts
        self._plans = [0] * weights.hosts
        self._host_of: dict[TrajectoryId, int] = {}

    def run(self, command: RunAction, call: SimulatedCall) -> None:
        host = self._host_of.get(call.trajectory_id)
        if host is None:
            there = Counter(self._host_of.values())
            host = self._host_of[call.trajectory_id] = min(range(self._weights.hosts), key=there.__getitem__)
        call.begun_s, call.units = self._time.now_s, 1
        self._advance(host)
        cap = float(call.work.demand[CPUS].most or 1)
        self._jobs[host].append(_Job(call, command.host_id, call.work.profile.seconds(1), cap))
        self._share(host)

    def abort(self, action_id: ActionId) -> None:
        raise NotImplementedError(f"{action_id}: these rollouts abort nothing")

    def trajectory_ended(self, trajectory_id: TrajectoryId) -> None:
        self._host_of.pop(trajectory_id, None)

    def _advance(self, host: int) -> None:
        passed_s = self._time.now_s - self._advanced_s[host]
        self._advanced_s[host] = self._time.now_s
        for job in self._jobs[host]:
            job.left_s -= job.speed * passed_s

    def _share(self, host: int) -> None:
        """Share the CPUs by weight, and look again soon: weights change."""
        jobs = self._jobs[host]
        next_s = math.inf
        weights = [self._weight(job) for job in jobs]
        for job, cpus in zip(jobs, filled(float(self._weights.cpus), [job.cap for job in jobs], weights), strict=True):
            serial_share = job.call.work.profile.serial_share
            job.speed = cpus if cpus < 1.0 else 1.0 / (serial_share + (1.0 - serial_share) / cpus)
            next_s = min(next_s, max(0.0, job.left_s) / job.speed, _PERIOD_S)
        self._plans[host] += 1
        if jobs:
            self._time.after(next_s, self._go_on, host, self._plans[host])

    def _weight(self, job: _Job) -> float:
        if job.cap == 1.0:
            return 1.0
        return self._weights.first / math.pow(max(job.left_s, _LEAST_S) / _SHORT_S, self._weights.power)

    def _go_on(self, host: int, plan: int) -> None:
        if plan != self._plans[host]:
            return
        self._advance(host)
        resolution_s = _RESOLUTION_S * max(1.0, self._time.now_s)
        over = [job for job in self._jobs[host] if job.left_s <= resolution_s]
        self._jobs[host] = [job for job in self._jobs[host] if job.left_s > resolution_s]
        self._share(host)
        for job in over:
            job.call.run_s = self._time.now_s - job.call.begun_s
            self._ended(ActionFinished(self._time.now_s, job.call.action_id, job.host_id, job.call.run_s), job.call)


def filled(cpus: float, limits: Sequence[float], weights: Sequence[float]) -> list[float]:
    """CPUs by weight, none above its limit (weighted max-min fairness)."""
    given, left = [0.0] * len(limits), list(range(len(limits)))
    while left:
        level = cpus / sum(weights[each] for each in left)
        full = [each for each in left if weights[each] * level >= limits[each]]
        for each in full or left:
            given[each] = min(limits[each], weights[each] * level)
            cpus -= given[each]
        left = [each for each in left if each not in full] if full else []
    return given
