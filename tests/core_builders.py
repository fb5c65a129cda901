"""Builders for the tests of the brain: short descriptions, and a stage that feeds events one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from heddle_dask.core import events as ev
from heddle_dask.core.commands import Command, RunAction, StartStep
from heddle_dask.core.controller import Controller, Limits
from heddle_dask.core.ids import ActionId, EngineId, GroupId, HostId, TrajectoryId
from heddle_dask.core.nouns import (
    ActionRequest,
    EngineDescription,
    HostDescription,
    StepRequest,
    TrajectorySpec,
)
from heddle_dask.core.state import Engine, State, Trajectory
from heddle_dask.core.story import encode
from heddle_dask.core.view import StrategySet
from heddle_dask.strategies.presets import build_strategies

Row = list[Any]


def trajectory_spec(name: str, prompt_tokens: int = 0) -> TrajectorySpec:
    """A trajectory that is alone in its group."""
    return TrajectorySpec(TrajectoryId(name), GroupId(f"group of {name}"), prompt_tokens=prompt_tokens)


def engine_of(name: str, slots: int = 4, max_context_tokens: int = 4096) -> EngineDescription:
    """An engine of that id."""
    return EngineDescription(EngineId(name), slots, max_context_tokens)


def host_of(name: str, cpus: int = 4, pool: str = "cpu") -> HostDescription:
    """A host of that id."""
    return HostDescription(HostId(name), cpus, pool)


def step_of(name: str, index: int = 0, *, attempt: int = 0, context: int = 100) -> StepRequest:
    """A step of the trajectory of that id."""
    return StepRequest(TrajectoryId(name), index, attempt, context, max_new_tokens=64)


def action_of(
    name: str, trajectory: str, *, cpus: tuple[int, int] = (1, 1), pool: str = "cpu"
) -> ActionRequest:
    """A tool call of that trajectory."""
    return ActionRequest(ActionId(name), TrajectoryId(trajectory), "tool", "test", *cpus, pool)


class Stage:
    """A controller, its clock and its journal. Checks the state after every event."""

    def __init__(
        self,
        preset: str = "sticky-least-loaded",
        *,
        seed: int = 0,
        overrides: Sequence[str] = (),
        strategies: StrategySet | None = None,
        limits: Limits | None = None,
    ) -> None:
        chosen = strategies or build_strategies(preset, seed=seed, overrides=overrides)
        self.controller = Controller(chosen, limits)
        self.journal: list[tuple[Row, list[Row]]] = []
        self.at = 0.0

    @property
    def state(self) -> State:
        """The controller's records."""
        return self.controller.state

    def trajectory(self, name: str) -> Trajectory:
        """The controller's record of a trajectory."""
        return self.state.trajectories[TrajectoryId(name)]

    def engine(self, name: str) -> Engine:
        """The controller's record of an engine."""
        return self.state.engines[EngineId(name)]

    def feed(self, kind: type, *fields: Any, **more: Any) -> list[Command]:
        """Let one event happen, a second after the one before."""
        self.at += 1.0
        event: ev.Event = kind(self.at, *fields, **more)
        commands = self.controller.handle(event)
        self.journal.append((encode(event), [encode(command) for command in commands]))
        self.state.check_integrity()
        return commands

    def late(self, kind: type, *fields: Any, **more: Any) -> None:
        """Let an event happen that must change nothing but the count of late arrivals."""
        before, counted = snapshot(self.state), self.state.late_arrivals
        assert self.feed(kind, *fields, **more) == []
        assert snapshot(self.state) == before
        assert self.state.late_arrivals == counted + 1

    # -- one event each, with the fields that matter ---------------------------------------------------

    def join(self, *names: str, slots: int = 4, max_context_tokens: int = 4096) -> list[Command]:
        """Engines join."""
        made = (engine_of(name, slots, max_context_tokens) for name in names)
        return _all(self.feed(ev.EngineJoined, engine) for engine in made)

    def lose(self, name: str, *, stranded: bool = True) -> list[Command]:
        """An engine is lost."""
        return self.feed(ev.EngineLost, EngineId(name), "test", stranded)

    def add_host(self, name: str, cpus: int = 4, pool: str = "cpu") -> list[Command]:
        """A host joins."""
        return self.feed(ev.HostJoined, host_of(name, cpus, pool))

    def submit(self, *names: str, prompt_tokens: int = 0) -> list[Command]:
        """Trajectories are submitted."""
        return _all(self.feed(ev.TrajectorySubmitted, trajectory_spec(n, prompt_tokens)) for n in names)

    def end(self, name: str) -> list[Command]:
        """The program of a trajectory returns."""
        return self.feed(ev.TrajectoryEnded, TrajectoryId(name), "completed")

    def request(self, name: str, index: int = 0, *, attempt: int = 0, context: int = 100) -> list[Command]:
        """A trajectory asks for a step."""
        return self.feed(ev.StepRequested, step_of(name, index, attempt=attempt, context=context))

    def placed(self, name: str, index: int = 0, *, attempt: int = 0, context: int = 100) -> StartStep:
        """A trajectory asks for a step and exactly one engine is told to run it."""
        (command,) = self.request(name, index, attempt=attempt, context=context)
        assert isinstance(command, StartStep)
        return command

    def start(self, step: StartStep) -> list[Command]:
        """The step gets its slot."""
        return self.feed(ev.StepStarted, *identity(step))

    def finish(self, step: StartStep, new_tokens: int = 10, reason: str = "stop") -> list[Command]:
        """The engine answers."""
        return self.feed(ev.StepFinished, *identity(step), new_tokens, 0, reason)

    def deliver(self, step: StartStep, new_tokens: int = 10, reason: str = "stop") -> list[Command]:
        """The driver has the answer before the controller has heard of it."""
        return self.feed(ev.StepDelivered, *identity(step), new_tokens, 0, reason)

    def fail(self, step: StartStep) -> list[Command]:
        """The step ends without an answer."""
        return self.feed(ev.StepFailed, *identity(step), "engine")

    def act(
        self, name: str, trajectory: str, *, cpus: tuple[int, int] = (1, 1), pool: str = "cpu"
    ) -> list[Command]:
        """A trajectory asks for an action."""
        return self.feed(ev.ActionRequested, action_of(name, trajectory, cpus=cpus, pool=pool))

    def acted(self, action: RunAction) -> list[Command]:
        """An action ends on its host."""
        return self.feed(ev.ActionFinished, action.action_id, action.host_id, 0.5)


def identity(step: StartStep) -> tuple[TrajectoryId, int, int, EngineId]:
    """What names this attempt at this engine in every message."""
    return step.trajectory_id, step.step_index, step.attempt, step.engine_id


def snapshot(state: State) -> dict[str, Any]:
    """All that an ignored event must leave as it was."""
    return {
        "trajectories": [repr(t) for t in state.trajectories.values()],
        "engines": [repr(e) for e in state.engines.values()],
        "actions": [repr(a) for a in state.actions.values()],
        "hosts": [repr(h) for h in state.hosts.values()],
        "waiting": [list(state.waiting_steps), list(state.waiting_actions), list(state.unadmitted)],
        "alive": state.alive,
    }


def _all(batches: Iterable[list[Command]]) -> list[Command]:
    return [command for batch in batches for command in batch]
