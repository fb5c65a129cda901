"""Builders for the tests of the brain: short descriptions, and a stage that feeds events one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from worlds.integrity import check_integrity

from heddle_dask.core import events as ev
from heddle_dask.core.commands import (
    Command,
    DropContext,
    MoveContext,
    PredictRemaining,
    RunAction,
    StartStep,
)
from heddle_dask.core.controller import Controller
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import ActionId, EngineId, GroupId, HostId, StepId, TrajectoryId
from heddle_dask.core.journal_codec import encode
from heddle_dask.core.nouns import (
    ActionRequest,
    EngineDescription,
    HostDescription,
    Prediction,
    StepRequest,
    TrajectorySpec,
)
from heddle_dask.core.resources import Amounts, ResourceDemand, Resources
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.core.state import State
from heddle_dask.core.view import ClusterView, Move, MoveRequest, StrategySet
from heddle_dask.strategies.migration.priced import choose_transfers
from heddle_dask.strategies.presets import build_strategies

Row = list[Any]


def trajectory_spec(name: str, prompt_tokens: int = 0, group: str = "") -> TrajectorySpec:
    """A trajectory, alone in its group unless that is named."""
    group_id = GroupId(group or f"group of {name}")
    return TrajectorySpec(TrajectoryId(name), group_id, prompt_tokens=prompt_tokens)


def engine_of(
    name: str, slots: int = 4, max_context_tokens: int = 4096, kv_tokens: int = 0, kv_transfer: bool = False
) -> EngineDescription:
    """An engine of that id."""
    return EngineDescription(
        EngineId(name),
        slots,
        max_context_tokens,
        kv_capacity_tokens=kv_tokens,
        kv_transfer=kv_transfer,
    )


def host_of(name: str, cpus: int = 4, pool: str = "cpu", memory_bytes: int = 0) -> HostDescription:
    """A host of that id."""
    return HostDescription(HostId(name), Resources.of(cpus=cpus, memory_bytes=memory_bytes), pool)


def step_of(name: str, index: int = 0, *, attempt: int = 0, context: int = 100) -> StepRequest:
    """A step of the trajectory of that id."""
    return StepRequest(StepId(TrajectoryId(name), index, attempt), context, max_new_tokens=64)


def action_of(name: str, trajectory: str, *, cpus: tuple[int, int] = (1, 1), pool: str = "cpu") -> ActionRequest:
    """A tool call of that trajectory."""
    demand = ResourceDemand.of(cpus=Amounts(*cpus))
    return ActionRequest(ActionId(name), TrajectoryId(trajectory), "tool", "test", demand, pool)


@dataclass
class Restless:
    """A migration that wants every trajectory elsewhere after every prediction: the next ready engine."""

    kinds: tuple[str, ...] = ("transfer", "recompute")
    asked: int = 0

    def propose(self, view: ClusterView, trajectory: Trajectory) -> Move | None:
        self.asked += 1
        others = [e for e in view.ready_engines if e.engine_id != trajectory.home]
        if not others:
            return None
        target = others[self.asked % len(others)].engine_id
        return Move(target, self.kinds[self.asked % len(self.kinds)], gain_s=1.0)

    def choose(self, waiting: Sequence[MoveRequest], running: Sequence[MoveRequest]) -> Sequence[MoveRequest]:
        return choose_transfers(waiting, running)


def restless_heddle(*, seed: int = 0, overrides: Sequence[str] = ()) -> StrategySet:
    """The preset heddle, with a migration that always moves and a preemption without a margin."""
    eager = ["preemption=hysteresis,ratio=1,margin_tokens=0", *overrides]
    return replace(build_strategies("heddle", seed=seed, overrides=eager), migration=Restless())


class Stage:
    """A controller, its clock and its journal. Checks the state after every event.

    Unless `retries` says otherwise, actions wait for workers without a bound, so that none asks for a time.
    """

    def __init__(
        self,
        preset: str = "sticky-least-loaded",
        *,
        seed: int = 0,
        overrides: Sequence[str] = (),
        strategies: StrategySet | None = None,
        retries: RetryPolicy | None = None,
    ) -> None:
        chosen = strategies or build_strategies(preset, seed=seed, overrides=overrides)
        self.controller = Controller(chosen, retries or RetryPolicy(max_pool_wait_s=0))
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
        before, (_, touches) = self._holdings(), self.state.touched_since(0)
        commands = self.controller.handle(event)
        self.journal.append((encode(event), [encode(command) for command in commands]))
        check_integrity(self.state)
        after = self._holdings()
        changed = {name for name, held in after.items() if name in before and held != before[name]}
        assert changed <= set(self.state.touched_since(touches)[0]), "who keeps sums over engines must hear of it"
        return commands

    def _holdings(self) -> dict[EngineId, tuple[list[TrajectoryId], int, int]]:
        engines = self.state.engines.items()
        return {name: (list(e.residents), e.resident_tokens, e.expected_tokens) for name, e in engines}

    def late(self, kind: type, *fields: Any, **more: Any) -> None:
        """Let an event happen that must change nothing but the count of stale events.

        A context that arrives too late is dropped where it arrived.
        """
        before, counted = self._all_there_is(), self.state.stale_events
        for command in self.feed(kind, *fields, **more):
            assert kind is ev.MoveEnded and isinstance(command, DropContext), command
            assert command.engine_id == fields[1]
            trajectory = self.state.trajectories.get(command.trajectory_id)
            assert trajectory is None or trajectory.home != command.engine_id
        assert self._all_there_is() == before
        assert self.state.stale_events == counted + 1

    def _all_there_is(self) -> dict[str, Any]:
        desk = self.controller.moves
        return {
            **snapshot(self.state),
            "moves": repr((desk._pending, desk._running, desk.totals)),
        }

    # -- one event each, with the fields that matter ---------------------------------------------------

    def join(self, *names: str, slots: int = 4, max_context_tokens: int = 4096, kv_tokens: int = 0) -> list[Command]:
        """Engines join."""
        made = (engine_of(name, slots, max_context_tokens, kv_tokens) for name in names)
        return _all(self.feed(ev.EngineJoined, engine) for engine in made)

    def lose(self, name: str, *, stranded: bool = True) -> list[Command]:
        """An engine is lost."""
        return self.feed(ev.EngineLost, EngineId(name), "test", stranded)

    def add_host(self, name: str, cpus: int = 4, pool: str = "cpu") -> list[Command]:
        """A host joins."""
        return self.feed(ev.HostJoined, host_of(name, cpus, pool))

    def submit(self, *names: str, prompt_tokens: int = 0, group: str = "") -> list[Command]:
        """Trajectories are submitted."""
        specs = (trajectory_spec(name, prompt_tokens, group) for name in names)
        return _all(self.feed(ev.TrajectorySubmitted, spec) for spec in specs)

    def end(self, name: str) -> list[Command]:
        """The program of a trajectory returns; returns what follows beside the drop of its context."""
        home = self.trajectory(name).home if TrajectoryId(name) in self.state.trajectories else None
        commands = self.feed(ev.TrajectoryEnded, TrajectoryId(name), "completed")
        if home is None:
            return commands
        assert commands[0] == DropContext(TrajectoryId(name), home)
        return commands[1:]

    def request(self, name: str, index: int = 0, *, attempt: int = 0, context: int = 100) -> list[Command]:
        """A trajectory asks for a step."""
        return self.feed(ev.StepRequested, step_of(name, index, attempt=attempt, context=context))

    def placed(self, name: str, index: int = 0, *, attempt: int = 0, context: int = 100) -> StartStep:
        """A trajectory asks for a step and exactly one engine is told to run it."""
        (command,) = self.request(name, index, attempt=attempt, context=context)
        assert isinstance(command, StartStep)
        return command

    def generating(self, name: str, index: int = 0, *, attempt: int = 0, context: int = 100) -> StartStep:
        """A step that is placed at once, preempts no other, and gets its slot."""
        step = self.placed(name, index, attempt=attempt, context=context)
        assert self.start(step) == []
        return step

    def start(self, step: StartStep) -> list[Command]:
        """The step gets its slot."""
        return self.feed(ev.StepStarted, *identity(step))

    def finish(
        self, step: StartStep, new_tokens: int = 10, reason: str = "stop", *, cached: int | None = None
    ) -> list[Command]:
        """The engine answers; without `cached` it had all of the context that it has ever had."""
        had = self.trajectory(step.step_id.trajectory_id)
        kept = had.kept_tokens if had.kept_on == step.engine_id else 0
        return self.feed(ev.StepFinished, *identity(step), new_tokens, kept if cached is None else cached, reason)

    def fail(self, step: StartStep) -> list[Command]:
        """The step ends without an answer."""
        return self.feed(ev.StepFailed, *identity(step), "engine")

    def predict(
        self,
        name: str,
        tokens: float,
        *,
        q90: float | None = None,
        steps: int | None = None,
        learnt_from: int | None = None,
    ) -> list[Command]:
        """The predictor answers, about the trajectory as it stands unless `steps` says otherwise."""
        high = tokens if q90 is None else q90
        known = self.trajectory(name).steps_finished if steps is None else steps
        said = Prediction(tokens, high, learnt_from=learnt_from)
        return self.feed(ev.PredictionMade, TrajectoryId(name), known, said)

    def moved(self, move: MoveContext, *, ok: bool = True, seconds: float = 0.5) -> list[Command]:
        """A move reports; returns what follows beside the drop of the copy that is not needed any more."""
        commands = self.feed(ev.MoveEnded, *move_facts(move, ok=ok, seconds=seconds))
        if not ok:
            return commands
        known = self.state.trajectories.get(move.trajectory_id)
        arrived = known is not None and known.home == move.target_engine_id
        idle = move.source_engine_id if arrived else move.target_engine_id
        assert commands[0] == DropContext(move.trajectory_id, idle)
        return commands[1:]

    def act(self, name: str, trajectory: str, *, cpus: tuple[int, int] = (1, 1), pool: str = "cpu") -> list[Command]:
        """A trajectory asks for an action."""
        return self.feed(ev.ActionRequested, action_of(name, trajectory, cpus=cpus, pool=pool))

    def acted(self, action: RunAction, run_s: float = 0.5) -> list[Command]:
        """An action ends on its host."""
        return self.feed(ev.ActionFinished, action.action_id, action.host_id, run_s)


def identity(step: StartStep) -> tuple[StepId, EngineId]:
    """What names this attempt at this engine in every message."""
    return step.step_id, step.engine_id


def move_facts(move: MoveContext, *, ok: bool = True, seconds: float = 0.5) -> tuple[Any, ...]:
    """The fields of `MoveEnded` for that move."""
    tokens = 100 if ok else 0
    cause = "" if ok else "test"
    target = move.target_engine_id
    return move.trajectory_id, target, ok, move.kind, seconds, tokens, cause, move.source_engine_id


def snapshot(state: State) -> dict[str, Any]:
    """All that an ignored event must leave as it was."""
    return {
        "trajectories": [repr(t) for t in state.trajectories.values()],
        "engines": [repr(e) for e in state.engines.values()],
        "actions": [repr(a) for a in state.actions.values()],
        "hosts": [repr(h) for h in state.hosts.values()],
        "waiting": [list(state.waiting_steps), list(state.waiting_actions), list(state.unadmitted)],
        "alive": state.alive,
        "groups": dict(state.unfinished_by_group),
    }


def _all(batches: Iterable[list[Command]]) -> list[Command]:
    return [command for batch in batches for command in batch]


def settle(stage: Stage, name: str, engine_id: str, tokens: float = 100.0) -> list[Command]:
    """A trajectory with its KV cache on that engine gets a new prediction during a tool call."""
    stage.submit(name)
    stage.state.set_home(stage.trajectory(name), EngineId(engine_id))
    step = stage.generating(name)
    assert step.engine_id == engine_id
    assert stage.finish(step) == [PredictRemaining(TrajectoryId(name))]
    stage.act(f"tool of {name}", name)
    return stage.predict(name, tokens)
