"""CPU time of the controller for actions: per started action with many waiting, and per pass over many free cores.

Steady: hosts are full and a constant number of actions waits; whenever one ends, another is requested. The CPU time of
every event counts, those of its trajectory included, divided by the actions that started. Burst: the cores of one empty
host, and as many actions that wait; the CPU time of the one pass counts. Actions can use 1 to 8 CPUs, and their
speed-up is declared.
"""

from __future__ import annotations

import heapq
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.ids import ActionId, GroupId, HostId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest, DurationProfile, HostDescription, Prediction, TrajectorySpec
from heddle_dask.core.resources import Amounts, ResourceDemand, Resources
from heddle_dask.strategies.presets import build_strategies

PER_STARTED = "per started action"
PER_PASS = "pass over a free host"
MOST_CPUS = 8
SERIAL_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class ActionDecisionRow:
    """CPU microseconds of `Controller.handle` for actions.

    Attributes
    ----------
    what
        ``"per started action"`` or ``"pass over a free host"``.
    waiting
        Actions that wait.
    count
        Started actions, or passes.
    started
        Mean number of actions that one measured event started.
    """

    strategy: str
    what: str
    waiting: int
    cpus: int
    count: int
    started: float
    mean_us: float
    p50_us: float
    p99_us: float


class _Hosts:
    """A controller with hosts, whose actions take their time in virtual seconds."""

    def __init__(self, strategy: str, hosts: int, cpus: int, seed: int) -> None:
        overrides = ["actions=" + re.sub(r":(?=\w+=)", ",", strategy)]
        self.controller = Controller(build_strategies("sticky-least-loaded", overrides=overrides))
        self.rng = random.Random(seed)
        self.at = 0.0
        self.number = 0
        self.started = 0
        self.spent_ns = 0
        self.calls_ns: list[int] = []
        self.due: list[tuple[float, int, ev.Event | None, cmd.RunAction | None]] = []
        self.profiles: dict[ActionId, DurationProfile] = {}
        for number in range(hosts):
            spec = HostDescription(HostId(f"h{number}"), Resources.of(cpus=cpus))
            self.tell(ev.HostJoined(0.0, spec))

    def tell(self, event: ev.Event) -> None:
        began = time.thread_time_ns()
        commands = self.controller.handle(event)
        took = time.thread_time_ns() - began
        self.spent_ns += took
        self.calls_ns.append(took)
        for command in commands:
            self.number += 1
            match command:
                case cmd.RunAction(action_id):
                    self.started += 1
                    seconds = self.profiles.pop(action_id).seconds(command.cpus)
                    heapq.heappush(self.due, (self.at + seconds, self.number, None, command))
                case cmd.WakeUp(at_s):
                    heapq.heappush(self.due, (max(at_s, self.at), self.number, ev.TimeReached(at_s), None))

    def request(self) -> None:
        self.number += 1
        name = TrajectoryId(f"t{self.number}")
        self.tell(ev.TrajectorySubmitted(self.at, TrajectorySpec(name, GroupId("g"))))
        tokens = self.rng.expovariate(1 / 1000)
        self.tell(ev.PredictionMade(self.at, name, 0, Prediction(tokens, 2 * tokens, "bench")))
        action_id = ActionId(f"{name} a")
        self.profiles[action_id] = DurationProfile(self.rng.lognormvariate(1.0, 1.0), SERIAL_SHARE)
        demand = ResourceDemand.of(cpus=Amounts(1, MOST_CPUS))
        spec = ActionRequest(action_id, name, "tool", "bench", demand, profile=self.profiles[action_id])
        self.tell(ev.ActionRequested(self.at, spec))

    def play_one(self) -> cmd.RunAction | None:
        """The next thing that happens; the command of the action that it ended, if any."""
        self.at, _, event, command = heapq.heappop(self.due)
        if command is None:
            assert isinstance(event, ev.TimeReached)
            self.tell(ev.TimeReached(self.at))
            return None
        self.tell(ev.ActionFinished(self.at, command.action_id, command.host_id, 1.0))
        self.tell(ev.TrajectoryEnded(self.at, TrajectoryId(command.action_id.split()[0]), "completed"))
        return command


def _steady(strategy: str, waiting: int, hosts: int, cpus: int, actions: int, seed: int) -> ActionDecisionRow:
    world = _Hosts(strategy, hosts, cpus, seed)
    for _ in range(waiting + hosts * cpus):
        world.request()
    per_action_us: list[float] = []
    while world.started < 2 * hosts * cpus:
        _refill(world, waiting)
    first = world.started
    while world.started < first + actions:
        spent, started = world.spent_ns, world.started
        while world.started == started:
            _refill(world, waiting)
        per_action_us += [(world.spent_ns - spent) / 1000 / (world.started - started)] * (world.started - started)
    return _row(strategy, PER_STARTED, waiting, hosts * cpus, per_action_us, 1.0)


def _refill(world: _Hosts, waiting: int) -> None:
    world.play_one()
    while len(world.controller.state.waiting_actions) < waiting:
        world.request()


def _burst(strategy: str, waiting: int, cpus: int, passes: int, seed: int) -> ActionDecisionRow:
    took_us: list[float] = []
    started = 0
    for number in range(passes):
        world = _Hosts(strategy, 0, cpus, seed + number)
        for _ in range(waiting):
            world.request()
        before = world.started
        world.tell(ev.HostJoined(world.at, HostDescription(HostId("h"), Resources.of(cpus=cpus))))
        took = world.calls_ns[-1]
        if world.started == before:
            world.play_one()
            took += world.calls_ns[-1]
        started += world.started - before
        took_us.append(took / 1000)
    return _row(strategy, PER_PASS, waiting, cpus, took_us, started / passes)


def _row(
    strategy: str, what: str, waiting: int, cpus: int, spent_us: Sequence[float], started: float
) -> ActionDecisionRow:
    ordered = sorted(spent_us)
    return ActionDecisionRow(
        strategy,
        what,
        waiting,
        cpus,
        len(ordered),
        round(started, 1),
        round(statistics.fmean(ordered), 1),
        round(ordered[len(ordered) // 2], 1),
        round(ordered[len(ordered) * 99 // 100], 1),
    )


def measure_action_decisions(
    strategies: Sequence[str],
    *,
    waiting: int = 1000,
    hosts: int = 5,
    cpus: int = 256,
    actions: int = 3000,
    passes: int = 100,
    seed: int = 0,
) -> Iterator[ActionDecisionRow]:
    """Rows for every strategy, written ``elastic:order=tail``.

    Parameters
    ----------
    actions, passes
        Started actions and passes that are measured.

    Raises
    ------
    BadInput
        Unknown strategy.
    """
    for strategy in strategies:
        yield _steady(strategy, waiting, hosts, cpus, actions, seed)
        yield _burst(strategy, waiting, cpus, passes, seed)
