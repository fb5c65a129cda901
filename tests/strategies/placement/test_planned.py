"""Placement by predicted work, one by one and as a batch, and the paper's presorted plan."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from worlds.core_builders import engine_of, step_of, trajectory_spec

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import GroupId
from heddle_dask.core.state import State
from heddle_dask.core.transitions import EngineState, TrajectoryState
from heddle_dask.core.view import Placement
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.engine_costs import EngineCosts
from heddle_dask.strategies.partition.least_end import rating_of
from heddle_dask.strategies.partition.work import Work, WorkLoad
from heddle_dask.strategies.partition.work_bound import least_seconds
from heddle_dask.strategies.placement.planned import Planned, remaining_tokens, work_of
from heddle_dask.strategies.placement.presorted import PresortedPlan, presorted_plan

COST = EngineCost(fixed_s=0.01, sequence_s=0.001, prefill_token_s=1e-4, capacity_tokens=100_000)


class Cluster:
    """Engines and trajectories in a real `State`, placed as the controller places them."""

    def __init__(self, strategy: Placement, *engines: Engine) -> None:
        self.strategy = strategy
        self.state = State()
        for engine in engines:
            self.state.engines[engine.engine_id] = engine
        self.state.refresh_ready()

    def trajectory(
        self, name: str, predicted: float | None, *, group: str = "", prompt: int = 100
    ) -> Trajectory:
        spec = trajectory_spec(name, prompt)
        if group:
            spec = replace(spec, group_id=GroupId(group))
        made = Trajectory(spec, self.state.next_number())
        made.predicted_tokens = predicted
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


def planned(**options: str) -> Planned:
    strategy = Planned(**options)
    strategy.use_costs({1: COST, 2: replace(COST, fixed_s=0.005, sequence_s=0.0005)})
    return strategy


def test_one_long_trajectory_counts_as_much_as_many_short_ones() -> None:
    cluster = Cluster(planned(), engine("a", 1, slots=32), engine("b", 2, slots=32))
    assert cluster.place(cluster.trajectory("long", 10_000)) == "a"
    shorts = [cluster.place(cluster.trajectory(f"s{i}", 100)) for i in range(20)]
    assert shorts == ["b"] * 20, "by count they would have been spread"


def test_it_keeps_the_home() -> None:
    cluster = Cluster(planned(), engine("a", 1), engine("b", 2))
    first = cluster.trajectory("t", 5000)
    assert cluster.place(first) == "a"
    first.predicted_tokens = 9e9
    assert cluster.place(first) == "a"


def test_members_follow_the_prompt_of_their_group_while_that_pays() -> None:
    cluster = Cluster(planned(), engine("a", 1, slots=32), engine("b", 2, slots=32))
    homes = [cluster.place(cluster.trajectory(f"t{i}", 100, group="g", prompt=50_000)) for i in range(4)]
    assert homes == ["a"] * 4  # 5 s of prefill against 0.1 s of decoding beside each other
    small = [cluster.place(cluster.trajectory(f"u{i}", 100, group="h", prompt=10)) for i in range(4)]
    assert small == ["b"] * 4


def test_memory_binds_before_slots() -> None:
    cluster = Cluster(
        planned(), engine("small", 1, slots=32, kv=2_000), engine("large", 2, slots=32, kv=50_000)
    )
    homes = [cluster.place(cluster.trajectory(f"t{i}", 500, prompt=1_000)) for i in range(12)]
    assert Counter(homes)["large"] >= 9


def test_the_fast_engine_takes_more() -> None:
    cluster = Cluster(planned(), engine("slow", 1), engine("fast", 2, tp_degree=2))
    homes = Counter(cluster.place(cluster.trajectory(f"t{i}", 1000)) for i in range(60))
    assert homes["fast"] == pytest.approx(40, abs=4)


def test_what_has_ended_no_longer_counts() -> None:
    cluster = Cluster(planned(), engine("a", 1), engine("b", 2))
    for i in range(40):
        cluster.place(cluster.trajectory(f"t{i}", 1000))
    for t in list(cluster.state.trajectories.values()):
        if t.home == "a":
            cluster.state.set_home(t, None)
    homes = [cluster.place(cluster.trajectory(f"n{i}", 1000)) for i in range(12)]
    assert Counter(homes)["a"] >= 11


def test_what_was_moved_counts_at_its_new_engine() -> None:
    cluster = Cluster(planned(), engine("a", 1), engine("b", 2))
    long = cluster.trajectory("long", 50_000)
    assert cluster.place(long) == "a"
    cluster.state.set_home(long, cluster.state.engines["b"].engine_id)  # type: ignore[index]
    assert cluster.place(long) == "b"
    homes = [cluster.place(cluster.trajectory(f"n{i}", 10)) for i in range(12)]
    assert Counter(homes)["a"] >= 9, "after the recount"


def test_lost_engines_are_forgotten() -> None:
    strategy = planned()
    cluster = Cluster(strategy, engine("a", 1))
    lost = cluster.trajectory("t", 100)
    cluster.place(lost)
    cluster.state.engines[lost.home].state = EngineState.LOST  # type: ignore[index]
    fresh = engine("b", 2)
    cluster.state.engines[fresh.engine_id] = fresh
    cluster.state.refresh_ready()
    assert cluster.place(cluster.trajectory("u", 100)) == "b"
    assert list(strategy._holdings) == ["b"]


def test_predictions_and_what_stands_in_for_them() -> None:
    made = Cluster(planned(), engine("a", 1)).trajectory("t", None, prompt=70)
    assert remaining_tokens(made) == 70
    made.predicted_tokens, made.predicted_tokens_q90 = 300.0, 900.0
    assert (remaining_tokens(made), remaining_tokens(made, "q90")) == (300, 900)
    made.predicted_tokens = float("nan")
    assert remaining_tokens(made) == 70
    made.context_tokens = 200
    work = work_of(made, "q90", 250)
    assert (work.decode_tokens, work.shared_tokens, work.prefill_tokens) == (900, 70, 180)


predictions = st.lists(st.integers(1, 20_000), min_size=1, max_size=30)


# Equal ones among the longest: the best of the three plans is one that no single gift or swap improves.
STUCK = [
    1,
    1274,
    1,
    18598,
    18598,
    1,
    450,
    1551,
    1935,
    4126,
    4867,
    828,
    3567,
    18598,
    1925,
    1986,
    2157,
    2296,
    3412,
]
STUCK += [4862, 4862, 4862, 4126, 5648]


def in_turn_s(works: Sequence[Work], loads: Sequence[WorkLoad]) -> float:
    """Makespan of placing each in turn where the end is earliest; all have their prompts still to be prefilled."""
    for work in works:
        ratings = [rating_of(load, work, 1.0) for load in loads]
        loads[ratings.index(min(ratings))].add(work)
    return max(load.seconds for load in loads)


@settings(deadline=None)
@given(predictions, st.integers(1, 4))
@example(STUCK, 3)
def test_a_batch_plan_is_followed_and_no_worse_than_one_by_one(values: list[int], engines: int) -> None:
    """Both counted alike, from nothing, or within a thousandth of what no plan can beat."""
    strategy = planned()
    cluster = Cluster(strategy, *(engine(f"e{i}", i + 1) for i in range(engines)))
    made = [cluster.trajectory(f"t{i}", value) for i, value in enumerate(values)]
    strategy.plan(made, cluster.state.ready_engines)
    plan = {i: engine_id for i, (_, engine_id) in strategy._plan.items()}
    assert len(plan) == (len(values) if len(values) >= engines else 0)
    homes = {one.trajectory_id: cluster.place(one) for one in made}
    assert not plan or homes == plan
    works = {one.trajectory_id: work_of(one) for one in made}
    ends = [
        WorkLoad.of(COST, 4, [works[i] for i, home in homes.items() if home == engine_id]).seconds
        for engine_id in cluster.state.engines
    ]
    empty = [WorkLoad(COST, 4) for _ in range(engines)]
    close_s = 1.001 * least_seconds(list(works.values()), empty)
    assert max(ends) <= max(in_turn_s(list(works.values()), empty), close_s) * (1 + 1e-9)


@settings(deadline=None)
@given(predictions, st.integers(1, 4))
@example(STUCK, 3)
def test_with_free_prefill_the_strategy_without_a_plan_is_no_better(values: list[int], engines: int) -> None:
    """With prefill that costs, it counts prompts of those placed before as made: another reckoning than the plan's."""
    ends = []
    for batch in (True, False):
        strategy = Planned()
        strategy.use_costs({1: replace(COST, prefill_token_s=0.0)})
        cluster = Cluster(strategy, *(engine(f"e{i}", i + 1) for i in range(engines)))
        made = [cluster.trajectory(f"t{i}", value) for i, value in enumerate(values)]
        if batch:
            strategy.plan(made, cluster.state.ready_engines)
        for one in made:
            cluster.place(one)
        ends.append(max(holding.load.seconds for holding in strategy._holdings.values()))
    empty = [WorkLoad(replace(COST, prefill_token_s=0.0), 4) for _ in range(engines)]
    close_s = 1.001 * least_seconds([work_of(one) for one in made], empty)
    assert ends[0] <= max(ends[1], close_s) * (1 + 1e-9)


def test_a_planned_engine_that_is_gone_is_replaced() -> None:
    for strategy in (planned(), PresortedPlan()):
        cluster = Cluster(strategy, engine("a", 1), engine("b", 2))
        made = [cluster.trajectory(f"t{i}", 1000 * (i + 1)) for i in range(8)]
        strategy.plan(made, cluster.state.ready_engines)
        cluster.state.engines[cluster.state.ready_engines[0].engine_id].state = EngineState.LOST
        cluster.state.refresh_ready()
        assert {cluster.place(one) for one in made} == {"b"}


def test_the_presorted_plan_puts_the_longest_on_the_highest_degree() -> None:
    strategy = PresortedPlan(profile="qwen3-14b-h100")
    cluster = Cluster(
        strategy, engine("one", 1), engine("four", 2, tp_degree=4), engine("two", 3, tp_degree=2)
    )
    made = [
        cluster.trajectory(f"t{i}", float(value)) for i, value in enumerate([10, 9000, 500, 20, 7000, 30])
    ]
    strategy.plan(made, cluster.state.ready_engines)
    assert strategy.latest is not None
    assert strategy.latest.engines == ("four", "two", "one")
    assert sum(strategy.latest.sizes) == 6
    homes = {one.trajectory_id: cluster.place(one) for one in made}
    rank = {"four": 0, "two": 1, "one": 2}
    by_length = sorted(made, key=lambda t: -remaining_tokens(t))
    ranks = [rank[homes[one.trajectory_id]] for one in by_length]
    assert ranks == sorted(ranks) and ranks[0] == 0
    assert homes == dict(strategy.latest.engine_of)


def test_without_a_plan_the_least_resident_load() -> None:
    cluster = Cluster(PresortedPlan(), engine("a", 1), engine("b", 2))
    assert [cluster.place(cluster.trajectory(f"t{i}", 10)) for i in range(4)] == ["a", "b", "a", "b"]


def test_plans_of_nothing_change_nothing() -> None:
    for strategy in (planned(), PresortedPlan()):
        cluster = Cluster(strategy, engine("a", 1))
        strategy.plan([], cluster.state.ready_engines)
        strategy.plan([cluster.trajectory("t", 1)], [])
        assert cluster.place(cluster.trajectory("u", 1)) == "a"


def test_bad_options_name_what_is_allowed() -> None:
    for kind in (Planned, PresortedPlan):
        with pytest.raises(BadInput, match="median or q90"):
            kind(quantile="mean")
        with pytest.raises(BadInput, match="unknown: use"):
            kind(profile="abacus")


def test_a_batch_smaller_than_the_engines_is_placed_one_by_one() -> None:
    strategy = planned()
    cluster = Cluster(strategy, *(engine(f"e{i}", i + 1) for i in range(4)))
    few = [cluster.trajectory(f"t{i}", 1000.0) for i in range(3)]
    strategy.plan(few, cluster.state.ready_engines)
    assert strategy._plan == {}
    assert sorted(cluster.place(one) for one in few) == ["e0", "e1", "e2"]


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


def test_few_newcomers_go_by_their_rank_in_the_presorted_plan_until_many_have_come() -> None:
    strategy = PresortedPlan()
    cluster = Cluster(strategy, *(engine(name, i) for i, name in enumerate("abc")))
    made = [cluster.trajectory(f"t{i}", float(10 * i)) for i in range(1, 31)]
    strategy.plan(made, cluster.state.ready_engines)
    latest = strategy.latest
    for one in made:
        cluster.place(one)
    expected = {"long": (1e6, "a"), "short": (1.0, "c")}
    for name, (tokens, engine_id) in expected.items():
        newcomer = cluster.trajectory(name, tokens)
        strategy.plan([newcomer], cluster.state.ready_engines)
        assert cluster.place(newcomer) == engine_id
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
    for strategy in (planned(), PresortedPlan()):
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
        code = "import test_planned; print(test_planned.decisions())"
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
