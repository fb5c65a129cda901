"""The CPUs that several processes share: the completely fair scheduler of Linux as a fluid.

Jobs get shares in proportion to their weights, and none gets more than its limit or more than it can use. What one
leaves, the others share (weighted max-min fairness; "Scheduling Domains" and "CFS bandwidth control" of the kernel's
documentation say that this is what weights and quotas aim at). A job that finds no idle CPUs up to its limit also has a
thread on every CPU that is taken, beside the one of its action, whose weight is the usual one. Switching costs nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from heddle_dask.core.nouns import DurationProfile
from heddle_dask.core.resources import cpu_weight
from heddle_dask.sim.loop import VirtualTime

_USUAL_WEIGHT = cpu_weight(0)


@dataclass(slots=True, eq=False)
class SharedJob:
    """One job on a node; `over` once it has ended or was removed."""

    cap: float
    profile: DurationProfile
    ended: Callable[..., None]
    arguments: tuple[Any, ...]
    nice: int = 0
    over: bool = False


@dataclass(slots=True, eq=False)
class _Class:
    """The running jobs with one limit, one serial share and one weight, which all advance at the same speed.

    `done_s` counts seconds of work, on one unit, that a job in it since the beginning would have done.
    """

    cap: float
    serial_share: float
    weight: float
    jobs: int = 0
    done_s: float = 0.0
    speed: float = 0.0
    heap: list[tuple[float, int, SharedJob]] = field(default_factory=list)

    def speed_with(self, cpus: float) -> float:
        """Seconds of work per second with so many CPUs: Amdahl's law from one CPU on, in proportion below."""
        if cpus < 1.0:
            return cpus
        return 1.0 / (self.serial_share + (1.0 - self.serial_share) / cpus)

    def drop_ended(self) -> None:
        """Drop removed jobs from the head of the heap."""
        while self.heap and self.heap[0][2].over:
            heapq.heappop(self.heap)


class SharedNode:
    """A node whose CPUs are shared by its jobs, but for those that others have taken.

    Attributes
    ----------
    cpus
        CPUs that nobody has taken.
    lost_s
        Seconds that whoever has taken a CPU since the beginning would have lost to the jobs.
    """

    def __init__(self, cpus: int, time: VirtualTime) -> None:
        self.cpus = cpus
        self.lost_s = 0.0
        self.jobs = 0
        self._taken = 0
        self._lost_share = 0.0
        self._time = time
        self._classes: dict[tuple[float, float, float], _Class] = {}
        self._advanced_s = 0.0
        self._number = 0
        self._plan = 0

    def add(self, job: SharedJob) -> None:
        """Begin a job; `job.ended` is called with its arguments at its end."""
        self._advance()
        key = _class_of(job)
        of_kind = self._classes.setdefault(key, _Class(*key))
        self._number += 1
        heapq.heappush(of_kind.heap, (of_kind.done_s + job.profile.one_unit_s, self._number, job))
        of_kind.jobs += 1
        self.jobs += 1
        self._share()

    def take(self, cpus: int) -> None:
        """From now on so many of the CPUs are not shared; negative: they are again."""
        self._advance()
        self.cpus -= cpus
        self._taken += cpus
        self._share()

    def lost_until_now_s(self) -> float:
        self._advance()
        return self.lost_s

    def stop(self) -> None:
        """The node is gone: none of its jobs reports."""
        self._plan += 1

    def remove(self, job: SharedJob) -> None:
        """End a job early; it does not report."""
        if job.over:
            return
        self._advance()
        job.over = True
        self._count_out(self._classes[_class_of(job)])
        self._share()

    def _count_out(self, of_kind: _Class) -> None:
        of_kind.jobs -= 1
        self.jobs -= 1
        if of_kind.jobs == 0:  # start again from 0: sums over a long run would lose digits
            of_kind.heap.clear()
            of_kind.done_s = 0.0

    def _advance(self) -> None:
        passed_s = self._time.now_s - self._advanced_s
        self._advanced_s = self._time.now_s
        if passed_s > 0.0:
            self.lost_s += self._lost_share * passed_s
            for of_kind in self._classes.values():
                if of_kind.jobs:
                    of_kind.done_s += of_kind.speed * passed_s

    def _share(self) -> None:
        """Share the CPUs anew, and plan the next end."""
        running = [one for one in self._classes.values() if one.jobs]
        level = fair_level(self.cpus, [(one.cap, one.weight, one.jobs) for one in running])
        wanted = sum(one.weight * one.jobs for one in running if one.cap > level * one.weight)
        self._lost_share = wanted / (wanted + _USUAL_WEIGHT)
        # Of each CPU that is taken, per unit of weight.
        beside = self._taken / (wanted + _USUAL_WEIGHT)
        next_s = math.inf
        for one in running:
            one.drop_ended()
            one.speed = one.speed_with(min(one.cap, (level + beside) * one.weight))
            next_s = min(next_s, max(0.0, one.heap[0][0] - one.done_s) / one.speed)
        self._plan += 1
        if next_s < math.inf:
            self._time.after(next_s, self._end_due, self._plan)

    def _end_due(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        ended: list[tuple[int, SharedJob]] = []
        for one in self._classes.values():
            # Rounding may leave a job a tiny step before its end, which the clock cannot resolve.
            while one.jobs and self._is_due(one):
                _, number, job = heapq.heappop(one.heap)
                job.over = True
                self._count_out(one)
                ended.append((number, job))
        self._share()
        for _, job in sorted(ended, key=lambda each: each[0]):
            job.ended(*job.arguments)

    def _is_due(self, one: _Class) -> bool:
        one.drop_ended()
        left_s = (one.heap[0][0] - one.done_s) / one.speed
        return left_s <= 1e-9 * max(1.0, self._time.now_s)


def _class_of(job: SharedJob) -> tuple[float, float, float]:
    return job.cap, job.profile.serial_share, cpu_weight(job.nice)


def fair_level(cpus: float, demands: Sequence[tuple[float, float, int]]) -> float:
    """CPUs per unit of weight of a job that is below its limit; infinite if all jobs get their limits.

    Parameters
    ----------
    demands
        Limit, weight and number of the jobs of each class.
    """
    left, weights = cpus, sum(weight * number for _, weight, number in demands)
    for cap, weight, number in sorted(demands, key=lambda each: each[0] / each[1]):
        if cap / weight * weights > left:
            return left / weights
        left -= cap * number
        weights -= weight * number
    return math.inf
