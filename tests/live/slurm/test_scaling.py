"""How many jobs of each group the work needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.live.clusters.slurm.scaling import (
    GroupSize,
    Held,
    ScalingRule,
    ScalingState,
    engines_needed,
    hold,
    spread,
    targets,
    tool_cpus_needed,
)
from heddle_dask.live.clusters.slurm.tending import Tending
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan, WorkerGroup
from heddle_dask.live.wire.cluster_messages import Demand

RULE = ScalingRule(llm_target_s=100.0, tool_target_s=10.0, hold_s=60.0, spill_s=300.0)
IDLE = Demand(session_open=False)


def sizes(role: str = "rollout") -> st.SearchStrategy[list[GroupSize]]:
    def size(name: int, units: int, minimum: int, more: int, stuck: int) -> GroupSize:
        return GroupSize(f"g{name}", role, units, minimum, max(1, minimum + more), stuck)

    one = st.tuples(st.integers(1, 8), st.integers(0, 3), st.integers(0, 6), st.integers(0, 4))
    return st.lists(one, min_size=1, max_size=4).map(
        lambda rows: [size(n, u, low, more, min(stuck, low + more)) for n, (u, low, more, stuck) in enumerate(rows)]
    )


demands = st.builds(
    Demand,
    session_open=st.booleans(),
    trajectories=st.integers(0, 200),
    open_tokens=st.floats(0, 1e7),
    sampled_tokens=st.integers(0, 10**7),
    generating=st.integers(0, 8),
    engines=st.integers(0, 8),
    slots=st.integers(0, 64),
    idle_engines=st.integers(0, 8),
    waiting_tool_cpus=st.integers(0, 100),
    waiting_tool_cpu_s=st.floats(0, 1e5),
    busy_tool_cpus=st.integers(0, 64),
)


@given(st.lists(st.tuples(demands, st.floats(0.1, 200.0)), min_size=1, max_size=12), sizes(), sizes("tool"))
def test_a_target_is_never_below_the_minimum_nor_above_the_maximum(
    steps: list[tuple[Demand, float]], rollout: list[GroupSize], tool: list[GroupSize]
) -> None:
    groups = rollout + [replace(group, name=f"tool-{group.name}") for group in tool]
    state, now_s = ScalingState({group.name: Held(100) for group in groups}), 0.0
    for demand, wait_s in steps:
        now_s += wait_s
        wanted, state = targets(demand, groups, state, now_s, RULE)
        assert wanted.keys() == {group.name for group in groups}
        assert all(group.minimum <= wanted[group.name] <= group.maximum for group in groups)


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0.1, 50.0)), min_size=1, max_size=30))
def test_the_number_in_force_rises_at_once_and_falls_only_after_the_hold(
    steps: list[tuple[int, float]],
) -> None:
    held, now_s, history = Held(5), 0.0, [(0.0, 5)]
    for wanted, wait_s in steps:
        now_s += wait_s
        before, held = held, hold(held, wanted, now_s, RULE.hold_s)
        history.append((now_s, wanted))
        assert held.jobs >= wanted
        if held.jobs < before.jobs:
            # Nothing in the time before asked for more than what it falls to.
            recent = [number for at_s, number in history if now_s - at_s < RULE.hold_s]
            assert held.jobs >= max(recent)


def test_a_lasting_lower_demand_is_followed() -> None:
    held = Held(5)
    for now_s in range(0, 200, 10):
        held = hold(held, 2, float(now_s), RULE.hold_s)
    assert held.jobs == 2


@given(st.integers(0, 100), sizes())
def test_the_groups_bring_what_is_needed_if_their_maxima_allow_it(units: int, groups: list[GroupSize]) -> None:
    jobs = spread(units, groups)
    assert all(group.minimum <= jobs[group.name] <= group.maximum for group in groups)
    brought = sum(max(0, jobs[g.name] - g.stuck) * g.units for g in groups)
    assert brought >= units or all(jobs[g.name] == g.maximum for g in groups)


@given(st.integers(0, 100), st.integers(0, 20), sizes())
def test_more_work_never_means_fewer_jobs_of_the_group_that_comes_first(
    units: int, more: int, groups: list[GroupSize]
) -> None:
    # The next one may get fewer: a large job of the first covers more than what was added.
    less, greater = spread(units, groups), spread(units + more, groups)
    assert less[groups[0].name] <= greater[groups[0].name]


def test_groups_are_filled_in_their_order_and_one_that_is_stuck_gives_way_to_the_next() -> None:
    fast, slow = GroupSize("fast", "rollout", 2, 0, 3), GroupSize("slow", "rollout", 1, 0, 8)
    assert spread(5, [fast, slow]) == {"fast": 3, "slow": 0}
    assert spread(8, [fast, slow]) == {"fast": 3, "slow": 2}
    assert spread(4, [replace(fast, stuck=2), slow]) == {"fast": 3, "slow": 2}


def test_no_work_needs_no_engine_and_an_open_session_needs_one_to_begin() -> None:
    assert engines_needed(IDLE, None, RULE) == 0
    assert engines_needed(Demand(session_open=True), None, RULE) == 1
    assert tool_cpus_needed(IDLE, RULE) == 0
    assert tool_cpus_needed(Demand(session_open=True), RULE) == 1


@pytest.mark.parametrize(
    ("trajectories", "open_tokens", "tokens_per_engine_s", "needed"),
    [
        (40, 1e6, None, 2),  # nothing measured yet: those that are there
        (40, 1e6, 5000.0, 2),  # two engines are done within the target
        (40, 1e6, 100.0, 10),  # more would have empty slots
        (1, 1e9, 1.0, 1),  # the long one at the end
    ],
)
def test_engines_follow_the_open_tokens_as_far_as_there_is_something_to_fill_them(
    trajectories: int, open_tokens: float, tokens_per_engine_s: float | None, needed: int
) -> None:
    demand = Demand(True, trajectories, open_tokens, engines=2, slots=8)
    assert engines_needed(demand, tokens_per_engine_s, RULE) == needed


def test_tool_cpus_follow_the_seconds_of_the_waiting_calls() -> None:
    short = Demand(True, waiting_tool_cpus=100, waiting_tool_cpu_s=20.0, busy_tool_cpus=4)
    assert tool_cpus_needed(short, RULE) == 4 + 2
    long = replace(short, waiting_tool_cpu_s=1e6)
    assert tool_cpus_needed(long, RULE) == 4 + 100


def test_the_speed_of_an_engine_is_measured_while_engines_work() -> None:
    state = ScalingState()
    working = Demand(True, 10, 1e4, sampled_tokens=0, generating=2, engines=2, slots=8)
    for now_s, tokens in ((1.0, 0), (3.0, 900), (11.0, 2000)):
        _, state = targets(replace(working, sampled_tokens=tokens), [], state, now_s, RULE)
    assert state.tokens_per_engine_s == pytest.approx(2000 / 10.0 / 2)
    _, state = targets(replace(working, sampled_tokens=0), [], state, 20.0, RULE)  # a new session
    assert state.tokens_per_engine_s == pytest.approx(100.0)


def test_while_an_engine_has_no_work_no_further_one_is_asked_for() -> None:
    busy = Demand(True, trajectories=200, open_tokens=1e6, generating=3, engines=4, slots=64)
    assert engines_needed(busy, 100.0, RULE) == 13
    assert engines_needed(replace(busy, idle_engines=1), 100.0, RULE) == 3
    assert engines_needed(replace(busy, engines=1, idle_engines=1), 100.0, RULE) == 1


def test_why_no_further_engine_is_asked_for_is_told_once_while_it_holds() -> None:
    told: list[str] = []
    plan = ClusterPlan({"gpu": WorkerGroup("gpu", "rollout", maximum=20)}, backend="local")
    made: Any = {"queue": None, "job_spec": None, "cancel_jobs": None}  # nothing is submitted here
    tending = Tending(None, plan, RULE, note=told.append, **made)  # type: ignore[arg-type]
    tending._scaling = replace(tending._scaling, tokens_per_engine_s=100.0)
    busy = Demand(True, trajectories=200, open_tokens=1e6, engines=4, slots=64)
    idle = replace(busy, idle_engines=1)
    few = replace(idle, trajectories=3)
    for now_s, demand in enumerate((busy, idle, idle, few, idle)):
        tending._follow(demand, float(now_s))
    why = "1 of 4 engines have no work: no further one is asked for, though the open work could use 13"
    assert told == [why, why], "and again where it holds again"
