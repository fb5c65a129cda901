"""Elastic CPUs on one worker against the best schedule that knows everything, found by trying all."""

from __future__ import annotations

import random
import statistics
from functools import lru_cache

import pytest

from benchmarks.opponents import FIXED, PAPER
from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.ids import ActionId, GroupId, HostId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest, DurationProfile, HostDescription, TrajectorySpec
from heddle_dask.core.resources import Amounts, ResourceDemand, Resources
from heddle_dask.sim.loop import VirtualTime
from heddle_dask.sim.program import SimulatedCall
from heddle_dask.sim.tools import SimulatedTools
from heddle_dask.strategies.presets import build_strategies
from heddle_dask.workloads.planned import PlannedAction

INSTANCES = 100
HOST = HostId("h")


@lru_cache
def instance(seed: int) -> tuple[int, list[tuple[int, float]], list[DurationProfile]]:
    """Cores of a worker, what runs on it (cores, seconds), and the suites that wait: each may use all cores."""
    rng = random.Random(seed)
    cores = left = rng.randint(3, 6)
    running = []
    for _ in range(rng.randint(0, 3)):
        if left:
            running.append((rng.randint(1, left), rng.lognormvariate(1.5, 1.2)))
            left -= running[-1][0]
    waiting = [
        DurationProfile(rng.lognormvariate(1.5, 1.0), rng.choice([0.0, 0.02, 0.1, 0.3]))
        for _ in range(rng.randint(2, 4))
    ]
    return cores, running, waiting


@lru_cache
def optimum(seed: int) -> float:
    """The least sum of completion times over all orders and numbers of cores, each as early as possible."""
    cores, running, waiting = instance(seed)
    best = float("inf")
    shortest = [profile.seconds(cores) for profile in waiting]

    def start(busy: list[tuple[float, float, int]], wanted: int, seconds: float) -> float:
        for at in sorted({0.0, *(end for _, end, _ in busy)}):
            moments = [at, *(begin for begin, _, _ in busy if at < begin < at + seconds)]
            if all(sum(n for b, e, n in busy if b <= moment < e) + wanted <= cores for moment in moments):
                return at
        raise AssertionError("in the end the worker is idle")

    def search(busy: list[tuple[float, float, int]], left: list[int], cost: float) -> None:
        nonlocal best
        if cost + sum(shortest[n] for n in left) >= best:
            return
        if not left:
            best = cost
        for number in left:
            rest = [n for n in left if n != number]
            for wanted in range(cores, 0, -1):
                seconds = waiting[number].seconds(wanted)
                at = start(busy, wanted, seconds)
                search([*busy, (at, at + seconds, wanted)], rest, cost + at + seconds)

    search([(0.0, seconds, n) for n, seconds in running], list(range(len(waiting))), 0.0)
    return best


def played(seed: int, actions: str, error: float) -> float:
    """The sum of completion times of the suites under a strategy that is told durations wrong by this share."""
    cores, running, waiting = instance(seed)
    rng = random.Random(f"{seed} {error}")
    controller = Controller(build_strategies("sticky-least-loaded", overrides=[f"actions={actions}"]))
    time, ends = VirtualTime(), dict[str, float]()
    calls: dict[str, SimulatedCall] = {}

    def ended(event: ev.ActionFinished, call: SimulatedCall) -> None:
        ends[event.action_id] = time.now_s
        tell(event)

    tools = SimulatedTools(time, lambda _: False, ended, {HOST: cores})

    def tell(event: ev.Event) -> None:
        for command in controller.handle(event):
            match command:
                case cmd.RunAction():
                    tools.run(command, calls[command.action_id])
                case cmd.WakeUp(at_s):
                    time.at(max(at_s, time.now_s), lambda: tell(ev.TimeReached(time.now_s)))

    def ask(name: str, demand: ResourceDemand, truth: DurationProfile) -> None:
        told = DurationProfile(truth.one_unit_s * rng.choice([1 + error, 1 / (1 + error)]), truth.serial_share)
        tell(ev.TrajectorySubmitted(0.0, TrajectorySpec(TrajectoryId(name), GroupId("g"))))
        request = ActionRequest(ActionId(name), TrajectoryId(name), "tool", "suite", demand, profile=told)
        calls[name] = SimulatedCall(request, PlannedAction("suite", truth, demand), 0.0)
        tell(ev.ActionRequested(0.0, request))

    tell(ev.HostJoined(0.0, HostDescription(HOST, Resources.of(cpus=cores))))
    for number, (wanted, seconds) in enumerate(running):
        ask(f"running {number}", ResourceDemand.of(cpus=wanted), DurationProfile(seconds, 1.0))
    for number, truth in enumerate(waiting):
        ask(f"waiting {number}", ResourceDemand.of(cpus=Amounts(1, cores)), truth)
    time.run()
    assert len(ends) == len(calls), "one never ends"
    return sum(ends[f"waiting {number}"] for number in range(len(waiting)))


def ratios(actions: str, error: float = 0.0) -> list[float]:
    return [played(seed, actions, error) / optimum(seed) for seed in range(INSTANCES)]


@pytest.mark.parametrize("error", [0.0, 0.3])
def test_the_sum_of_completion_times_is_near_the_optimum_and_never_twice_of_it(error: float) -> None:
    """Idle cores that are lent need no durations, so wrong ones change nothing."""
    ours = ratios("elastic", error)
    assert statistics.fmean(ours) <= 1.13
    assert max(ours) <= 2.0
    for other in (PAPER, "fcfs-minimum", f"{FIXED},units=2"):
        assert statistics.fmean(ours) < statistics.fmean(ratios(other, error)), other
