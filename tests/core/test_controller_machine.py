"""Hypothesis plays random worlds against the controller; `World` checks every command and every state."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from worlds.core_world import (
    RESTLESS,
    WORLDS,
    World,
    new_world,
    play,
    strategies_of,
)

from benchmarks.opponents import FIXED, PAPER, PER_TRAJECTORY, WORKER_POOLS
from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.journal_codec import replay

GROUPS: dict[str, tuple[str, ...]] = {
    "engines": ("join_engine", "drain_engine", "expire_engine", "lose_engine", "engine_dies"),
    "hosts": ("join_host", "drain_host", "lose_host"),
    "trajectories": ("submit", "fork", "end"),
    "steps": ("start", "finish", "abort", "stopped", "fail", "cancel"),
    "predictions": ("predict",),
    "moves": ("move_ends",),
    "actions": ("act", "act_ends", "act_cancel", "time"),
}


class RandomWorld(RuleBasedStateMachine):
    """Each rule is one thing that happens; `World` asserts what must hold after it."""

    world: World

    @initialize(
        preset=st.sampled_from(sorted(WORLDS)),
        seed=st.integers(0, 3),
        alive=st.sampled_from([None, 1, 3]),
        max_losses=st.integers(0, 2),
        actions=st.sampled_from(["fcfs-minimum", "elastic", "elastic,order=fcfs,max_wait_s=5"]),
    )
    def begin(self, preset: str, seed: int, alive: int | None, max_losses: int, actions: str) -> None:
        self.overrides = [] if alive is None else [f"admission=at-most,alive={alive}"]
        self.overrides.append(f"actions={actions}")
        self.preset, self.seed = preset, seed
        self.world = new_world(preset, self._pick, seed=seed, max_losses=max_losses, overrides=self.overrides)

    def _pick(self, choices: Sequence[Any]) -> Any:
        return self.data.draw(st.sampled_from(choices)) if self.data is not None else choices[0]

    data: Any = None

    def _one_of(self, moves: Sequence[str], data: Any) -> None:
        possible = [(move, subject) for move in moves for subject in self.world.possible(move)]
        if not possible:
            return
        self.data = data
        move, subject = data.draw(st.sampled_from(possible))
        self.world.do(move, subject)
        self.data = None

    @rule(data=st.data())
    def engines_come_and_go(self, data: Any) -> None:
        self._one_of(GROUPS["engines"], data)

    @rule(data=st.data())
    def hosts_come_and_go(self, data: Any) -> None:
        self._one_of(GROUPS["hosts"], data)

    @rule(data=st.data())
    def trajectories_come_and_go(self, data: Any) -> None:
        self._one_of(GROUPS["trajectories"], data)

    @precondition(lambda self: self.world.possible("request"))
    @rule(data=st.data())
    def a_step_is_requested(self, data: Any) -> None:
        self._one_of(("request",), data)

    @precondition(lambda self: self.world.possible("finish"))
    @rule(data=st.data())
    def a_step_moves_on(self, data: Any) -> None:
        self._one_of(GROUPS["steps"], data)

    @precondition(lambda self: self.world.asked)
    @rule(data=st.data())
    def a_prediction_is_made(self, data: Any) -> None:
        self._one_of(GROUPS["predictions"], data)

    @precondition(lambda self: self.world.moves)
    @rule(data=st.data())
    def a_move_ends(self, data: Any) -> None:
        self._one_of(GROUPS["moves"], data)

    @rule(data=st.data())
    def actions_come_and_go(self, data: Any) -> None:
        self._one_of(GROUPS["actions"], data)

    @precondition(lambda self: self.world.stale)
    @rule(data=st.data())
    def a_message_comes_late_or_twice(self, data: Any) -> None:
        self._one_of(("stale",), data)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.data = None
        self.world.drain()
        lines = json.loads(json.dumps(self.world.stage.journal))
        chosen = strategies_of(self.preset, seed=self.seed, overrides=self.overrides)
        fresh = Controller(chosen, self.world.retries)
        assert list(replay(fresh, lines)) == []


# A failure is shrunk for up to five minutes; the ceiling lets it end.
TestRandomWorld = pytest.mark.timeout(900)(RandomWorld.TestCase)
TestRandomWorld.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


# What takes part only with that part of a preset switched on.
NEEDS_PREDICTOR = {"PredictRemaining", "PredictionMade"}
# Engines change between batches only (`test_deployments`); a world is one batch.
BETWEEN_BATCHES = {"DegreesRequested", "DegreesPlanned", "PlanDegrees", "DeployEngines"}
# Runs come and go in `test_shared_world`.
RUNS = {"RunStarted", "RunEnded"}
# Quotas, sandboxes, services and rewards after a program's end are not in these worlds.
POOLS = {
    "PoolsDeclared",
    "ReportApi",
    "SandboxClosed",
    "CloseSandbox",
    "ProgramEnded",
}
# Training is in `test_training_world`.
TRAINING = {
    "OptimizerStepEnded",
    "WeightsPublished",
    "WeightsFetched",
    "SwitchRequested",
    "WeightsInstalled",
    "GroupEnded",
    "TrajectoryRedundant",
    "FetchWeights",
    "InstallWeights",
    "CancelTrajectory",
}
SERVICES = {
    "ServiceLoaded",
    "ServiceEvicted",
    "ServiceLost",
    "LoadService",
    "EvictService",
    "DropServiceCopy",
}
ACTIONS = (
    "fcfs-minimum",
    "elastic",
    "elastic,order=fcfs,max_wait_s=5,depth=0",
    "elastic,gather_s=3",
    PAPER,
    f"{FIXED},units=2",
    f"{PER_TRAJECTORY},cpus=2",
    f"{PER_TRAJECTORY},cpus=4,request=1",
    f"{WORKER_POOLS},workers=2,units=2,kinds=lint:1x1",
)


@pytest.mark.parametrize("preset", WORLDS)
def test_long_worlds_come_to_their_end(preset: str) -> None:
    kinds: set[str] = set()
    chosen = strategies_of(preset, seed=0, overrides=())
    for seed in range(12 if chosen.predictor else 8):
        overrides = ["admission=at-most,alive=4"] if seed % 3 == 0 else []
        world = play(preset, seed=1000 + seed, moves=400, overrides=overrides)
        assert world.stage.state.stale_events > 0
        for event, commands in world.stage.journal:
            kinds |= {event[0], *(command[0] for command in commands)}
    expected = {kind.__name__ for kind in (*get_args(ev.Event), *get_args(cmd.Command))}
    expected -= BETWEEN_BATCHES | POOLS | SERVICES | RUNS | TRAINING
    if chosen.predictor is None:
        expected -= NEEDS_PREDICTOR
    assert kinds == expected, "every kind of event and command took part"


@pytest.mark.parametrize("actions", ACTIONS)
def test_actions_of_every_strategy_start_fit_and_end(actions: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(6):
        preset = ("sticky-least-loaded", "heddle")[seed % 2]
        world = play(preset, seed=2000 + seed, moves=300, overrides=[f"actions={actions}"])
        seen += world.seen
        lines = json.loads(json.dumps(world.stage.journal))
        chosen = strategies_of(preset, seed=2000 + seed, overrides=[f"actions={actions}"])
        assert list(replay(Controller(chosen, world.retries), lines)) == []
    chooses = not actions.startswith(("fcfs-minimum", "elastic"))
    assert (seen["more than the least units"] > 0) == chooses
    assert (seen["may use idle CPUs"] > 0) == actions.startswith("elastic")
    assert seen["asked for a time"]


def test_restless_worlds_see_every_turn_that_a_move_or_a_preemption_can_take() -> None:
    seen: Counter[str] = Counter()
    exposed_s = 0.0
    for seed in range(40):
        world = play(RESTLESS, seed=seed, moves=400)
        seen += world.seen
        exposed_s += sum(total.exposed_s for total in world.stage.controller.moves.totals.values())
    assert set(seen) >= {
        "preempted",
        "stopped and asked for again",
        "prediction came late",
        "move by transfer",
        "move by recompute",
        "move ended well",
        "move ended badly",
        "move lost its source",
        "move lost its target",
        "step waited for a move",
        "step waited for a move that lost its source",
        "step waited for a move that lost its target",
        "ended while its context moved",
        "stopped before it began",
        "stopped while it ran",
        "drained",
    }, sorted(seen)
    assert exposed_s > 0
