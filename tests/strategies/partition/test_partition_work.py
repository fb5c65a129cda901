"""Seconds by work, against a batch played iteration by iteration."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.partition.work import Work, WorkLoad

COST = EngineCost(fixed_s=0.01, token_s=1e-4, prefill_token_s=1e-5, context_token_s=1e-7, capacity_tokens=100_000)

work = st.builds(
    Work,
    group=st.sampled_from(["a", "b", "c"]),
    decode_tokens=st.floats(1, 20_000),
    context_tokens=st.floats(0, 5_000),
    shared_tokens=st.floats(0, 5_000),
    prefill_tokens=st.floats(0, 5_000),
    tool_s=st.floats(0, 100),
)


def test_busy_seconds_are_those_of_the_batch_played_iteration_by_iteration() -> None:
    works = [Work("a", tokens, context) for tokens, context in ((400, 100), (150, 900), (30, 10), (30, 0))]
    played_s = 0.0
    for iteration in range(400):
        here = [w for w in works if w.decode_tokens > iteration]
        context = sum(int(w.context_tokens) + iteration for w in here)
        played_s += COST.iteration_s(len(here), context)
    assert WorkLoad.of(COST, 8, works).seconds == pytest.approx(played_s, rel=1e-4)


def test_beyond_the_slots_and_beyond_the_memory_they_take_turns() -> None:
    fixed = EngineCost(fixed_s=1.0)
    four = [Work("a", 100)] * 4
    assert [WorkLoad.of(fixed, slots, four).seconds for slots in (8, 4, 2, 1)] == [100, 100, 200, 400]
    tight = EngineCost(fixed_s=1.0, capacity_tokens=2_000)
    held = [Work("a", 100, context_tokens=950)] * 4  # 1,000 tokens each on average: two fit
    assert WorkLoad.of(tight, 8, held).seconds == 200


def test_a_shared_prompt_is_prefilled_once_per_engine() -> None:
    cost = EngineCost(fixed_s=0.0, prefill_token_s=1.0)
    first, sibling, stranger = (Work(name, 1, shared_tokens=10, prefill_tokens=1) for name in "aab")
    assert WorkLoad.of(cost, 8, [first, sibling]).seconds == 12
    assert WorkLoad.of(cost, 8, [first, stranger]).seconds == 22


@settings(deadline=None)
@given(st.lists(work, max_size=6), work)
def test_more_work_never_ends_earlier(works: list[Work], more: Work) -> None:
    load = WorkLoad.of(COST, 2, works)
    before_s = load.seconds
    load.add(more)
    assert load.seconds >= before_s
