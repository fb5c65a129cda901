"""A random world in which runs come and go: each has its own preset, and all share engines and hosts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from worlds.core_builders import Stage, trajectory_spec
from worlds.core_world import WEIGHTS, WORLDS, Pick, Program, World, strategies_of

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.ids import FIRST_RUN, RunId
from heddle_dask.core.placements import most_sent
from heddle_dask.core.run_description import RetryPolicy, RunDescription
from heddle_dask.core.run_record import plain_name, qualified
from heddle_dask.core.view import StrategySet

MOST_RUNS: Final = 3
RUN_MOVES: Final = {"join_run": 3.0, "leave_run": 1.5}


def strategies_of_description(run: RunDescription) -> StrategySet:
    """What a run of that description is played with."""
    return strategies_of(run.strategy, seed=run.seed, overrides=run.overrides)


def shared_controller(first: RunDescription) -> Controller:
    """A controller that other runs may join."""
    return Controller(strategies_of_description(first), first.retries, strategies_of_description)


@dataclass
class SharedWorld(World):
    """Trajectories belong to runs; a run that leaves takes its trajectories with it."""

    runs: dict[RunId, RunDescription] = field(default_factory=dict)
    run_of: dict[str, RunId] = field(default_factory=dict)
    joined: int = 1

    def check(self) -> None:
        super().check()
        state = self.stage.state
        assert list(state.runs) == list(self.runs)
        for engine_id in self.ready:
            engine = state.engines[engine_id]
            sent = len(engine.inflight) - engine.held
            assert not engine.held or (state.is_shared and sent >= most_sent(engine)), "a free place is used"

    def possible(self, move: str) -> list[Any]:
        if move == "join_run":
            return list(WORLDS) if len(self.runs) < MOST_RUNS else []
        if move == "leave_run":
            return list(self.runs) if len(self.runs) > 1 else []
        return super().possible(move)

    def _do_join_run(self, preset: str) -> None:
        self.joined += 1
        run_id = RunId(str(self.joined))
        run = RunDescription(
            run_id,
            f"run {run_id}",
            self.pick((0.5, 1.0, 3.0)),
            preset,
            seed=self.joined,
            retries=self.retries,
        )
        self.runs[run_id] = run
        self.tell(ev.RunStarted, run)

    def _do_leave_run(self, run_id: RunId) -> None:
        del self.runs[run_id]
        for name in [name for name in self.programs if self.run_of[name] == run_id]:
            self._forget_program(name)
        self.stale.append((ev.RunEnded, run_id))
        self.tell(ev.RunEnded, run_id)

    def _forget_program(self, name: str) -> None:
        del self.programs[name]
        for action, call in list(self.calls.items()):
            if call.request.trajectory_id == name:
                call.orphaned = True
                if call.host_id is None:
                    del self.calls[action]
                    self.line.remove(action)

    def _do_submit(self, prompt_tokens: int) -> None:
        run_id = self.pick(list(self.runs))
        name = qualified(run_id, self.fresh("t"))
        assert plain_name(name)[0] == run_id
        self.programs[name] = Program()
        self.run_of[name] = run_id
        group = qualified(run_id, self.pick(("g1", "g2")))
        spec = replace(trajectory_spec(name, prompt_tokens, group), run_id=run_id)
        self.tell(ev.TrajectorySubmitted, spec)

    def _do_fork(self, parent: str) -> None:
        run_id = self.run_of[parent]
        name = qualified(run_id, self.fresh("f"))
        self.programs[name] = Program(admitted=True)
        self.run_of[name] = run_id
        record = self.stage.trajectory(parent)
        spec = trajectory_spec(name, record.context_tokens, record.spec.group_id)
        self.tell(ev.TrajectoryForked, replace(spec, run_id=run_id), parent)

    def _start_step(self, command: cmd.StartStep) -> None:
        super()._start_step(command)
        engine = self.stage.state.engines[command.engine_id]
        assert len(engine.inflight) >= len(self._steps_at(command.engine_id))


def new_shared_world(pick: Pick[Any], preset: str, *, seed: int, max_losses: int = 2) -> SharedWorld:
    """An empty world with one run."""
    retries = RetryPolicy(max_losses)
    first = RunDescription(strategy=preset, seed=seed, retries=retries)
    stage = Stage(strategies=strategies_of_description(first), retries=retries)
    stage.controller = shared_controller(first)
    world = SharedWorld(stage, retries, pick, kv_tokens=(0, 600, 20_000)[seed % 3], runs={FIRST_RUN: first})
    world.tell(ev.RunStarted, first)
    return world


def play_shared(preset: str, *, seed: int, moves: int, draws: Sequence[str] = ()) -> SharedWorld:
    """A world of that many random moves."""
    rng = random.Random(seed)
    world = new_shared_world(rng.choice, preset, seed=seed, max_losses=seed % 3)
    calm = {"lose_engine": 0.4, "drain_engine": 0.4, "engine_dies": 0.4} if seed % 2 else {}
    weights = {**WEIGHTS, **RUN_MOVES, **calm}
    for move in draws or rng.choices(list(weights), list(weights.values()), k=moves):
        if subjects := world.possible(move):
            world.do(move, rng.choice(subjects))
    world.drain()
    return world
