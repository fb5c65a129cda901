"""The engine that would end earliest, found without asking all: the choice of asking all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.batch_builders import synthetic_works

from heddle_dask.cost.engine_cost import EngineCost, load_profile
from heddle_dask.strategies.partition import work_plan
from heddle_dask.strategies.partition.least_end import LeastEnd, rating_of
from heddle_dask.strategies.partition.work import Work, WorkLoad
from heddle_dask.strategies.partition.work_plan import WorkEngine, plan_by_work

COSTS = (
    EngineCost(fixed_s=0.01, sequence_s=0.001, prefill_token_s=1e-3, capacity_tokens=50_000),
    EngineCost(fixed_s=0.005, context_token_s=1e-7),
)
tokens = st.sampled_from([0.0, 1.0, 500.0]) | st.floats(0, 5000)
works = st.lists(
    st.builds(
        Work,
        group=st.sampled_from("abc"),
        decode_tokens=tokens,
        context_tokens=tokens,
        shared_tokens=tokens,
        prefill_tokens=tokens,
        tool_s=st.sampled_from([0.0, 0.0, 30.0]),
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from([1, 8])), min_size=1, max_size=8),
    works,
    works,
    st.sampled_from([0.0, 1.0]),
)
def test_the_choice_is_that_of_asking_all(
    kinds: list[tuple[int, int]], held: list[Work], coming: list[Work], prompts: float
) -> None:
    loads = [WorkLoad(COSTS[kind], slots) for kind, slots in kinds]
    for i, work in enumerate(held):
        loads[i % len(loads)].host(work)
    ends = LeastEnd(loads, prompts)
    for work in coming:
        ratings = [rating_of(load, work, prompts) for load in loads]
        chosen = ends.first(work)
        assert chosen == ratings.index(min(ratings))
        ends.add(chosen, work)


def test_it_asks_few_of_many_equal_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = WorkLoad.ends_with
    monkeypatch.setattr(WorkLoad, "ends_with", lambda load, work: asked.append(1) or real(load, work))
    ends = LeastEnd([WorkLoad(COSTS[0], 8) for _ in range(64)])
    for i in range(640):
        work = Work(f"g{i // 16}", 1000.0, 600.0, 600.0)
        ends.add(ends.first(work), work)
    assert len(asked) < 640 * 16


def test_a_plan_starts_from_what_is_held_however_that_is_said() -> None:
    cost = load_profile("qwen3-14b-h100", 4)
    batch = synthetic_works(120, 1)
    held = [synthetic_works(10 * j, 2 + j) for j in range(4)]
    told = [WorkEngine(cost, 8, tuple(resident)) for resident in held]
    summed = [WorkEngine(cost, 8, held=engine.load()) for engine in told]
    before = [engine.load() for engine in summed]
    assert plan_by_work(batch, told) == plan_by_work(batch, summed)
    assert [engine.load() for engine in summed] == before, "a plan changes no load that it was given"


def test_the_list_plan_is_the_one_of_asking_all() -> None:
    cost = load_profile("qwen3-14b-h100", 4)
    batch = synthetic_works(400, 5)
    engines = [WorkEngine(cost, 16)] * 7
    loads = [engine.load() for engine in engines]
    engine_of = []
    for work in batch:
        ends = [load.ends_with(work) for load in loads]
        engine_of.append(ends.index(min(ends)))
        loads[engine_of[-1]].add(work)
    plan = work_plan._listed(batch, engines, range(len(batch)))
    assert list(plan.engine_of) == engine_of
