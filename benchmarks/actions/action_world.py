"""Trajectories that think and act, on hosts in virtual time: a small world for choosing among action strategies.

The controller is the real one; engines are left out, so thinking takes the planned seconds whatever the load. All draws
are from one seed and are made before the world starts: every strategy meets the same trajectories.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.ids import ActionId, GroupId, HostId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest, DurationProfile, HostDescription, Prediction, TrajectorySpec
from heddle_dask.core.resources import Amounts, ResourceDemand, Resources
from heddle_dask.strategies.presets import build_strategies

PACE_S = 0.02
"""Seconds per token by which thinking is told to the controller as tokens."""


@dataclass(frozen=True, slots=True)
class ActionShape:
    """One planned action: its kind, its amounts of CPUs, and how long it really takes."""

    label: str
    cpus: Amounts
    truth: DurationProfile


@dataclass(frozen=True, slots=True)
class PlannedLife:
    """One trajectory: seconds of thinking before each action; its last action is the reward."""

    begins_s: float
    think_s: tuple[float, ...]
    actions: tuple[ActionShape, ...]

    def left_s(self, step: int) -> tuple[float, float]:
        """Seconds of thinking and of actions (with least units) from this action on."""
        acting = sum(shape.truth.seconds(shape.cpus.least) for shape in self.actions[step:])
        return sum(self.think_s[step + 1 :]), acting


@dataclass(frozen=True, slots=True)
class AblationBatch:
    """What the trajectories of a batch do.

    Attributes
    ----------
    batch
        Trajectories.
    steps
        Mean number of tool calls of a trajectory; long-tailed by `step_spread`, the standard deviation of its log.
    think_s, tool_s
        Mean seconds between calls, and of a call on one CPU.
    reward_s, reward_most
        Mean seconds of the reward on one CPU, and the most CPUs that it can use.
    tool_most
        The most CPUs that a call can use.
    serial
        Share of the seconds that more CPUs do not shorten.
    """

    batch: int
    steps: float = 12.0
    step_spread: float = 0.6
    think_s: float = 1.2
    tool_s: float = 1.0
    tool_most: int = 1
    reward_s: float = 30.0
    reward_most: int = 32
    serial: float = 0.05

    def lives(self, seed: int) -> list[PlannedLife]:
        """The trajectories of the batch."""
        rng = random.Random(seed)

        def long_tailed(mean: float, spread: float) -> float:
            return mean * rng.lognormvariate(-spread * spread / 2, spread)

        lives = []
        for _ in range(self.batch):
            calls = max(1, round(long_tailed(self.steps, self.step_spread)))
            shapes = [
                ActionShape(
                    "tool",
                    Amounts(1, self.tool_most),
                    DurationProfile(long_tailed(self.tool_s, 1.0), self.serial),
                )
                for _ in range(calls)
            ]
            reward = DurationProfile(long_tailed(self.reward_s, 0.8), self.serial)
            shapes.append(ActionShape("reward", Amounts(1, self.reward_most), reward))
            think = tuple(long_tailed(self.think_s, 0.5) for _ in shapes)
            lives.append(PlannedLife(rng.random(), think, tuple(shapes)))
        return lives


@dataclass(frozen=True, slots=True)
class WorldJob:
    """One batch on hosts of one size.

    Attributes
    ----------
    actions
        The strategy, ``elastic,order=fcfs``.
    known
        Whether the controller is told the speed-ups; otherwise it learns them.
    error
        Standard deviation of the log of the predictions' error.
    """

    batch: AblationBatch
    actions: str
    hosts: int = 1
    cpus: int = 128
    known: bool = True
    error: float = 0.5
    seed: int = 0


@dataclass(frozen=True, slots=True)
class WorldFigures:
    """What a batch took: means from request to end of actions, of all and by label, and the last trajectory's end."""

    mean_s: float
    tool_s: float
    reward_s: float
    makespan_s: float


def run_world(job: WorldJob) -> WorldFigures:
    """Play a batch to its end."""
    return _ActionWorld(job).run()


class _ActionWorld:
    def __init__(self, job: WorldJob) -> None:
        self._lives, self._known = job.batch.lives(job.seed), job.known
        self._controller = Controller(build_strategies("sticky-least-loaded", overrides=[f"actions={job.actions}"]))
        self._completion_s: dict[str, list[float]] = {"tool": [], "reward": []}
        self._makespan_s = self._at = 0.0
        self._error = [random.Random(f"{job.seed} {n}").lognormvariate(0.0, job.error) for n in range(len(self._lives))]
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._requested: dict[ActionId, float] = {}
        self._shapes: dict[ActionId, tuple[int, int]] = {}
        for number in range(job.hosts):
            host = HostDescription(HostId(f"h{number}"), Resources.of(cpus=job.cpus))
            self._tell(ev.HostJoined(0.0, host))
        for number, life in enumerate(self._lives):
            name = TrajectoryId(f"t{number}")
            self._tell(ev.TrajectorySubmitted(0.0, TrajectorySpec(name, GroupId(f"g{number // 16}"))))
            self._later(life.begins_s + life.think_s[0], partial(self._act, number, 0))

    def run(self) -> WorldFigures:
        while self._due:
            self._at, _, happen = heapq.heappop(self._due)
            happen()
        assert not self._controller.state.trajectories, "the batch does not end"
        tools_s, rewards_s = self._completion_s["tool"], self._completion_s["reward"]
        mean = statistics.fmean
        return WorldFigures(mean([*tools_s, *rewards_s]), mean(tools_s), mean(rewards_s), self._makespan_s)

    def _later(self, seconds: float, happen: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._due, (self._at + seconds, self._number, happen))

    def _tell(self, event: ev.Event) -> None:
        for command in self._controller.handle(event):
            match command:
                case cmd.RunAction():
                    self._run(command)
                case cmd.WakeUp(at_s):
                    self._later(max(0.0, at_s - self._at), lambda: self._tell(ev.TimeReached(self._at)))

    def _act(self, number: int, step: int) -> None:
        life, name = self._lives[number], TrajectoryId(f"t{number}")
        shape = life.actions[step]
        action_id = ActionId(f"{name} {step}")
        self._requested[action_id], self._shapes[action_id] = self._at, (number, step)
        think_s, acting_s = (seconds * self._error[number] for seconds in life.left_s(step))
        tokens = think_s / PACE_S
        self._tell(ev.PredictionMade(self._at, name, 0, Prediction(tokens, tokens, "world", tools_s=acting_s)))
        profile = shape.truth if self._known and shape.cpus.elastic else None
        demand = ResourceDemand.of(cpus=shape.cpus)
        self._tell(
            ev.ActionRequested(self._at, ActionRequest(action_id, name, "tool", shape.label, demand, profile=profile))
        )

    def _run(self, command: cmd.RunAction) -> None:
        number, step = self._shapes[command.action_id]
        seconds = self._lives[number].actions[step].truth.seconds(command.cpus)
        self._later(seconds, lambda: self._ended(command, seconds))

    def _ended(self, command: cmd.RunAction, seconds: float) -> None:
        number, step = self._shapes.pop(command.action_id)
        life = self._lives[number]
        took_s = self._at - self._requested.pop(command.action_id)
        self._completion_s[life.actions[step].label].append(took_s)
        self._tell(ev.ActionFinished(self._at, command.action_id, command.host_id, seconds))
        if step + 1 < len(life.actions):
            self._later(life.think_s[step + 1], lambda: self._act(number, step + 1))
        else:
            self._makespan_s = max(self._makespan_s, self._at)
            self._tell(ev.TrajectoryEnded(self._at, TrajectoryId(f"t{number}"), "completed"))
