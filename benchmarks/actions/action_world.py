"""Trajectories that think and act, on hosts in virtual time: a small world for choosing among action strategies.

The controller is the real one; engines are left out, so thinking takes the planned seconds whatever the load. All draws
are from one seed and are made before the world starts: every strategy meets the same trajectories.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class WorldFigures:
    """What a batch took.

    Attributes
    ----------
    completion_s
        Seconds from request to end of each action, by label.
    makespan_s
        End of the last trajectory.
    events
        Events of the controller.
    """

    completion_s: dict[str, list[float]] = field(default_factory=dict)
    makespan_s: float = 0.0
    events: int = 0

    @property
    def mean_s(self) -> float:
        """Mean completion time of all actions."""
        return statistics.fmean(s for each in self.completion_s.values() for s in each)


class ActionWorld:
    """One batch on hosts of one size.

    Parameters
    ----------
    actions
        The strategy, ``elastic,order=fcfs``.
    known
        Whether the controller is told the speed-ups; otherwise it learns them.
    error
        Standard deviation of the log of the predictions' error.
    """

    def __init__(
        self,
        lives: Sequence[PlannedLife],
        actions: str,
        *,
        hosts: int = 5,
        cpus: int = 256,
        known: bool = True,
        error: float = 0.5,
        seed: int = 0,
    ) -> None:
        self.lives = lives
        self.known = known
        self.controller = Controller(
            build_strategies("sticky-least-loaded", overrides=[f"actions={actions}"])
        )
        self.figures = WorldFigures()
        self.at = 0.0
        self._error = [random.Random(f"{seed} {n}").lognormvariate(0.0, error) for n in range(len(lives))]
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._requested: dict[ActionId, float] = {}
        self._shapes: dict[ActionId, tuple[int, int]] = {}
        for number in range(hosts):
            self._tell(ev.HostJoined(0.0, HostDescription(HostId(f"h{number}"), Resources.of(cpus=cpus))))
        for number, life in enumerate(lives):
            name = TrajectoryId(f"t{number}")
            self._tell(ev.TrajectorySubmitted(0.0, TrajectorySpec(name, GroupId(f"g{number // 16}"))))
            self._later(life.begins_s + life.think_s[0], partial(self._act, number, 0))

    def run(self) -> WorldFigures:
        """Play the batch to its end."""
        while self._due:
            self.at, _, happen = heapq.heappop(self._due)
            happen()
        assert not self.controller.state.trajectories, "the batch does not end"
        return self.figures

    def _later(self, seconds: float, happen: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._due, (self.at + seconds, self._number, happen))

    def _tell(self, event: ev.Event) -> None:
        self.figures.events += 1
        for command in self.controller.handle(event):
            match command:
                case cmd.RunAction():
                    self._run(command)
                case cmd.WakeUp(at_s):
                    self._later(max(0.0, at_s - self.at), lambda: self._tell(ev.TimeReached(self.at)))

    def _act(self, number: int, step: int) -> None:
        life, name = self.lives[number], TrajectoryId(f"t{number}")
        shape = life.actions[step]
        action_id = ActionId(f"{name} {step}")
        self._requested[action_id], self._shapes[action_id] = self.at, (number, step)
        think_s, acting_s = (seconds * self._error[number] for seconds in life.left_s(step))
        tokens = think_s / PACE_S
        self._tell(ev.PredictionMade(self.at, name, 0, Prediction(tokens, tokens, "world", tools_s=acting_s)))
        profile = shape.truth if self.known and shape.cpus.elastic else None
        demand = ResourceDemand.of(cpus=shape.cpus)
        self._tell(
            ev.ActionRequested(
                self.at, ActionRequest(action_id, name, "tool", shape.label, demand, profile=profile)
            )
        )

    def _run(self, command: cmd.RunAction) -> None:
        number, step = self._shapes[command.action_id]
        seconds = self.lives[number].actions[step].truth.seconds(command.cpus)
        self._later(seconds, lambda: self._ended(command, seconds))

    def _ended(self, command: cmd.RunAction, seconds: float) -> None:
        number, step = self._shapes.pop(command.action_id)
        life = self.lives[number]
        took_s = self.at - self._requested.pop(command.action_id)
        self.figures.completion_s.setdefault(life.actions[step].label, []).append(took_s)
        self._tell(ev.ActionFinished(self.at, command.action_id, command.host_id, seconds))
        if step + 1 < len(life.actions):
            self._later(life.think_s[step + 1], lambda: self._act(number, step + 1))
        else:
            self.figures.makespan_s = max(self.figures.makespan_s, self.at)
            self._tell(ev.TrajectoryEnded(self.at, TrajectoryId(f"t{number}"), "completed"))
