"""Engines on shared cores: slower while others work, as fast as alone when they do not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.core.ids import EngineId
from heddle_dask.core.nouns import EngineDescription
from heddle_dask.cost.engine_cost import EngineCost, fixed_cost
from heddle_dask.sim.engine import SharedCores, SimulatedEngine
from heddle_dask.sim.kv_cache import SimulatedJob
from heddle_dask.sim.loop import VirtualTime

ALONE = EngineCost(fixed_s=0.01, sequence_s=1e-3, prefill_token_s=1e-4, chunk_tokens=64)
CROWDED = EngineCost(fixed_s=0.03, sequence_s=2e-3, prefill_token_s=3e-4, chunk_tokens=64)

# Engine, arrival, prompt, length, aborted so long after it.
jobs = st.tuples(
    st.integers(0, 1),
    st.floats(0, 2),
    st.integers(1, 200),
    st.integers(1, 60),
    st.none() | st.floats(0, 2),
)


def play(costs: dict[int, EngineCost], plan: list[tuple], lost_s: float | None = None) -> list[SimulatedJob]:
    """The jobs in order of the plan, after two engines of two slots have done them."""
    time = VirtualTime()
    shared = SharedCores(costs, time)
    ended: list[SimulatedJob] = []
    for name in ("a", "b"):
        description = EngineDescription(EngineId(name), 2, 4096, kv_capacity_tokens=100_000)
        engine = SimulatedEngine(
            description,
            costs[max(costs)],
            time,
            lambda engine, job: None,
            lambda engine, job: ended.append(job),
            on_busy=shared.changed,
        )
        shared.engines.append(engine)
    made = []
    for number, (where, arrival_s, prompt, length, abort_s) in enumerate(plan):
        job = SimulatedJob(prompt, length, trajectory_id=f"t{number}", group_id=f"g{number}", shared_tokens=prompt)
        made.append(job)
        time.at(arrival_s, shared.engines[where].submit, job)
        if abort_s is not None:
            time.at(arrival_s + abort_s, shared.engines[where].abort, job)
    if lost_s is not None:
        time.at(lost_s, shared.engines[1].lose)
    time.run()
    if lost_s is None:
        assert sorted(map(id, ended)) == sorted(map(id, made)), "each job ends once"
        assert not any(engine.busy for engine in shared.engines)
    return made


def test_an_engine_is_slow_until_its_neighbour_has_done_its_work() -> None:
    costs = {1: fixed_cost(0.01), 2: fixed_cost(0.03)}
    plan = [(0, 0.0, 5, 100, None), (1, 0.0, 5, 10, None)]
    long, short = play(costs, plan)
    assert short.ended_s == pytest.approx(0.3)
    assert long.ended_s == pytest.approx(0.3 + 90 * 0.01)
    (long, _) = play(costs, plan, lost_s=0.15)
    assert long.ended_s == pytest.approx(0.15 + 95 * 0.01)
    (alone,) = play(costs, [(1, 1.0, 5, 100, None)])
    assert alone.ended_s == pytest.approx(2.0)


def test_numbers_that_were_not_measured_cost_what_the_next_smaller_one_does() -> None:
    shared = SharedCores({2: ALONE, 4: CROWDED}, VirtualTime())
    assert [shared.cost_of(busy) for busy in range(6)] == [ALONE] * 4 + [CROWDED] * 2


@settings(max_examples=100, deadline=None)
@given(st.lists(jobs, min_size=1, max_size=8))
def test_nobody_ends_before_it_would_alone_nor_after_it_would_always_crowded(plan: list[tuple]) -> None:
    whole = [(*job[:4], None) for job in plan]
    quick, mixed, slow = (play(costs, whole) for costs in ({1: ALONE}, {1: ALONE, 2: CROWDED}, {1: CROWDED}))
    for one, other, third in zip(quick, mixed, slow, strict=True):
        # An iteration that is under way when the price changes takes the new one, all of it.
        assert one.ended_s - 0.1 <= other.ended_s <= third.ended_s + 0.1
        assert one.generated == other.generated == other.length
    play({1: ALONE, 2: CROWDED}, plan)
