"""The paper's presorted plan as a placement."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from worlds.core_builders import engine_of, step_of, trajectory_spec

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import GroupId
from heddle_dask.core.nouns import Prediction
from heddle_dask.core.state import State
from heddle_dask.core.transitions import EngineState, TrajectoryState
from heddle_dask.core.view import Placement
from heddle_dask.strategies.engine_costs import EngineCosts
from heddle_dask.strategies.placement.presorted import PresortedPlan, presorted_plan
from heddle_dask.strategies.remaining import remaining_or_context_tokens


class Cluster:
    """Engines and trajectories in a real `State`, placed as the controller places them."""

    def __init__(self, strategy: Placement, *engines: Engine) -> None:
        self.strategy = strategy
        self.state = State()
        for engine in engines:
            self.state.engines[engine.engine_id] = engine
        self.state.refresh_ready()

    def trajectory(self, name: str, predicted: float | None, *, group: str = "", prompt: int = 100) -> Trajectory:
        spec = trajectory_spec(name, prompt)
        if group:
            spec = replace(spec, group_id=GroupId(group))
        made = Trajectory(spec, self.state.next_number())
        if predicted is not None:
            made.prediction = Prediction(predicted, predicted)
        self.state.trajectories[made.trajectory_id] = made
        return made

    def place(self, trajectory: Trajectory) -> str:
        step = step_of(trajectory.trajectory_id, context=max(1, trajectory.spec.prompt_tokens))
        chosen = self.strategy.choose_engine(trajectory, step, self.state.ready_engines)
        assert chosen is not None
        self.state.set_home(trajectory, chosen.engine_id)
        return chosen.engine_id


def engine(name: str, number: int, *, slots: int = 4, tp_degree: int = 1, kv: int = 0) -> Engine:
    spec = replace(engine_of(name, slots), tp_degree=tp_degree, kv_capacity_tokens=kv)
    return Engine(spec, number)


def test_predictions_and_what_stands_in_for_them() -> None:
    made = Cluster(PresortedPlan(), engine("a", 1)).trajectory("t", None, prompt=70)
    assert remaining_or_context_tokens(made) == 70
    made.context_tokens = 200
    assert remaining_or_context_tokens(made) == 200
    made.prediction = Prediction(300.0, 900.0)
    assert (remaining_or_context_tokens(made), remaining_or_context_tokens(made, "q90")) == (300, 900)
    made.generated_tokens += 400
    assert (remaining_or_context_tokens(made), remaining_or_context_tokens(made, "q90")) == (0, 500)


def test_a_planned_engine_that_is_gone_is_replaced() -> None:
    strategy = PresortedPlan()
    cluster = Cluster(strategy, engine("a", 1), engine("b", 2))
    made = [cluster.trajectory(f"t{i}", 1000 * (i + 1)) for i in range(8)]
    strategy.plan(made, cluster.state.ready_engines)
    cluster.state.engines[cluster.state.ready_engines[0].engine_id].state = EngineState.LOST
    cluster.state.refresh_ready()
    assert {cluster.place(one) for one in made} == {"b"}


def test_the_presorted_plan_puts_the_longest_on_the_highest_degree() -> None:
    strategy = PresortedPlan(profile="qwen3-14b-h100")
    cluster = Cluster(strategy, engine("one", 1), engine("four", 2, tp_degree=4), engine("two", 3, tp_degree=2))
    made = [cluster.trajectory(f"t{i}", float(value)) for i, value in enumerate([10, 9000, 500, 20, 7000, 30])]
    strategy.plan(made, cluster.state.ready_engines)
    assert strategy.latest is not None
    assert strategy.latest.engines == ("four", "two", "one")
    assert sum(strategy.latest.sizes) == 6
    homes = {one.trajectory_id: cluster.place(one) for one in made}
    rank = {"four": 0, "two": 1, "one": 2}
    by_length = sorted(made, key=lambda t: -remaining_or_context_tokens(t))
    ranks = [rank[homes[one.trajectory_id]] for one in by_length]
    assert ranks == sorted(ranks) and ranks[0] == 0
    assert homes == dict(strategy.latest.engine_of)


def test_without_a_plan_the_least_resident_load() -> None:
    cluster = Cluster(PresortedPlan(), engine("a", 1), engine("b", 2))
    assert [cluster.place(cluster.trajectory(f"t{i}", 10)) for i in range(4)] == ["a", "b", "a", "b"]


def test_plans_of_nothing_change_nothing() -> None:
    strategy = PresortedPlan()
    cluster = Cluster(strategy, engine("a", 1))
    strategy.plan([], cluster.state.ready_engines)
    strategy.plan([cluster.trajectory("t", 1)], [])
    assert cluster.place(cluster.trajectory("u", 1)) == "a"


def test_bad_options_name_what_is_allowed() -> None:
    with pytest.raises(BadInput, match="median or q90"):
        PresortedPlan(quantile="mean")
    with pytest.raises(BadInput, match="unknown: use"):
        PresortedPlan(profile="abacus")


def test_the_presorted_plan_counts_what_still_runs() -> None:
    """Four long ones run on the first engine; two short ones and two of middle length come."""
    strategy = PresortedPlan()
    cluster = Cluster(strategy, engine("a", 1, slots=2), engine("b", 2, slots=2))
    first = [cluster.trajectory(f"t{i}", 9000.0 - i) for i in range(4)]
    strategy.plan(first, cluster.state.ready_engines)
    for one in first:
        cluster.place(one)
    second = [cluster.trajectory(f"n{i}", tokens) for i, tokens in enumerate((10.0, 20.0, 30.0))]
    strategy.plan(second, cluster.state.ready_engines)
    assert strategy.latest is not None
    assert sum(strategy.latest.sizes) == 7, "ranks are among all that are active"
    assert {cluster.place(one) for one in second} == {"b"}, "the shortest of all; alone they would be parted"
    alone = PresortedPlan()
    alone.plan(second, cluster.state.ready_engines)
    assert alone.latest is not None and min(alone.latest.sizes) > 0


def test_few_arrivals_go_by_their_rank_in_the_presorted_plan_until_many_have_come() -> None:
    strategy = PresortedPlan()
    cluster = Cluster(strategy, *(engine(name, i) for i, name in enumerate("abc")))
    made = [cluster.trajectory(f"t{i}", float(10 * i)) for i in range(1, 31)]
    strategy.plan(made, cluster.state.ready_engines)
    latest = strategy.latest
    for one in made:
        cluster.place(one)
    expected = {"long": (1e6, "a"), "short": (1.0, "c")}
    for name, (tokens, engine_id) in expected.items():
        arrival = cluster.trajectory(name, tokens)
        strategy.plan([arrival], cluster.state.ready_engines)
        assert cluster.place(arrival) == engine_id
    assert strategy.latest is latest
    for i in range(14):
        strategy.plan([cluster.trajectory(f"n{i}", 50.0)], cluster.state.ready_engines)
    assert strategy.latest is not None and strategy.latest is not latest
    assert sum(strategy.latest.sizes) == 46


def test_the_presorted_plan_keeps_nothing_of_what_has_ended() -> None:
    strategy = PresortedPlan()
    cluster = Cluster(strategy, engine("a", 1), engine("b", 2))
    for i in range(300):
        one = cluster.trajectory(f"t{i}", 100.0)
        strategy.plan([one], cluster.state.ready_engines)
        one.state = TrajectoryState.ENDED
    assert len(strategy._active) < 10 and len(strategy._open) < 10


def decisions() -> Sequence[object]:
    """Everything here that decides, once, for the comparison of hash seeds."""
    rng = random.Random(5)
    told: list[object] = []
    strategy = PresortedPlan()
    cluster = Cluster(strategy, *(engine(f"e{i}", i + 1, tp_degree=1 + i % 2) for i in range(5)))
    made = [
        cluster.trajectory(f"t{i}", rng.choice((100.0, 5000.0, rng.random() * 1e4)), group=f"g{i // 4}")
        for i in range(60)
    ]
    strategy.plan(made[:40], cluster.state.ready_engines)
    told.append([cluster.place(one) for one in made])
    return told


def test_every_hash_seed_decides_the_same() -> None:
    told = []
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        code = "import test_presorted; print(test_presorted.decisions())"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            env=environment,
            capture_output=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr.decode()
        told.append(done.stdout)
    assert told[0] == told[1] and b"e4" in told[0]


def test_costs_take_the_capacity_that_the_engine_announces() -> None:
    costs = EngineCosts("tiny-cpu")
    assert costs.of(engine("a", 1, kv=777)).capacity_tokens == 777
    assert costs.of(engine("b", 2)).capacity_tokens == 1_000_000


def test_the_plan_for_the_rank_rule_covers_all() -> None:
    cluster = Cluster(PresortedPlan(), engine("a", 1), engine("b", 2))
    made = [cluster.trajectory(f"t{i}", 10.0) for i in range(5)]
    plan = presorted_plan(made, cluster.state.ready_engines, EngineCosts("tiny-cpu"))
    assert set(plan.engine_of) == {one.trajectory_id for one in made}
    assert sum(plan.sizes) == 5 and len(plan.sizes) == len(plan.engines) == 2
