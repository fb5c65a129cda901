"""What an engine can do until a deadline, and when everything could be done: against sums and searches by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.core_builders import Stage, engine_of, step_of, trajectory_spec

from benchmarks.deadline.engine_backlog import (
    BacklogItem,
    BacklogLeft,
    EngineBacklog,
    backlog_item,
    iterations_of,
)
from benchmarks.deadline.length_sums import LengthSums
from benchmarks.deadline.makespan_estimate import BusyEngine, makespan_estimate_s
from benchmarks.deadline.running_step import unseen_tokens
from heddle_dask.core import events as ev
from heddle_dask.core.ids import StepId, TrajectoryId
from heddle_dask.core.nouns import Prediction
from heddle_dask.cost.iteration import EngineCost
from heddle_dask.strategies.remaining import RemainingDemand

COST = EngineCost(fixed_s=0.005, token_s=3e-5, prefill_token_s=2e-5, sequence_s=1e-5, context_token_s=1e-8)
IDLE = BacklogLeft(0.0, 0.0, 0.0, 0.0)


def plain(tokens: float, context: float = 100.0, tools_s: float = 0.0) -> BacklogItem:
    return backlog_item(RemainingDemand(tokens, (tokens,), 1.0, context, 1.0, tools_s))


def test_an_ask_is_the_sum_over_its_tokens() -> None:
    ask = backlog_item(RemainingDemand(10.0, (10.0,), 1.5, 100.0, 3.0, 2.0))
    # Half a token further each time: the sum over the middles.
    area = sum(100.0 + 3.0 * (token + 0.5) for token in range(10))
    assert ask == BacklogItem(10.0, 20.0, 2.0, pytest.approx(area), pytest.approx(1.5 * area))


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 50)), max_size=6),
    st.tuples(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 50)),
    st.floats(1.0, 500.0),
)
def test_a_room_is_the_sum_over_all_that_are_there(
    there: list[tuple[int, int, int]], more: tuple[int, int, int], rest_s: float
) -> None:
    asks = [plain(*row) for row in (*there, more)]
    longest = max(
        ask.tokens / (1 - min(0.9, ask.tools_s / rest_s)) for ask in asks
    )  # who waits for tools has the less time for its tokens
    tokens, area = sum(ask.tokens for ask in asks), sum(ask.area for ask in asks)
    iterations = max(longest, tokens / 8, area / 20_000)
    by_hand_s = 0.005 * iterations + 4e-5 * tokens + 1e-8 * area
    room = EngineBacklog(COST, 8, 20_000, rest_s, items=asks[:-1])
    assert room.end_with_s(asks[-1], rest_s) == pytest.approx(by_hand_s)
    assert room.fits(asks[-1]) == (room.end_with_s(asks[-1], rest_s) <= rest_s)
    later_s = room.rest_with_s(asks[-1])
    assert later_s >= rest_s and room.end_with_s(asks[-1], later_s) <= later_s
    room.add(asks[-1])
    assert room.end_s == pytest.approx(by_hand_s)


def test_what_is_left_shrinks_as_the_engine_works_and_is_gone_at_its_end() -> None:
    room = EngineBacklog(COST, 8, 1e6, 100.0, at=10.0, items=[plain(1000), plain(2000)])
    now, half, gone = (room.left(10.0 + share * room.end_s) for share in (0.0, 0.5, 1.5))
    assert now.longest == 2000 and gone == BacklogLeft(0.0, 0.0, 0.0, 0.0)
    assert half == pytest.approx(tuple(part / 2 for part in now))


@given(
    st.lists(st.integers(200, 20_000), min_size=1, max_size=7),
    st.integers(1, 3),
    st.sampled_from([1.0, 0.5]),
)
@settings(max_examples=60)
def test_the_foreseen_end_is_that_of_the_best_split_in_the_order_of_length_but_for_what_does_not_divide(
    lengths: list[int], engines: int, slower: float
) -> None:
    """Many of each length, so that hardly anything is lost by cutting; every way to cut the sorted row is tried."""
    many = 400
    slow = EngineCost(fixed_s=COST.fixed_s / slower, token_s=4e-5, context_token_s=1e-8)
    costs = [COST, *[slow] * (engines - 1)]
    row = sorted(set(lengths), reverse=True)
    sums = LengthSums()
    for length, _ in itertools.product(row, range(many)):
        sums.add(length, plain(length))
    ahead = [BusyEngine(cost, 64, 1e6, IDLE) for cost in costs]
    found_s = makespan_estimate_s(sums.longest_first(), ahead)

    def end_s(cost: EngineCost, shares: list[float]) -> float:
        """Of an engine that takes these shares of each length."""
        longest = max((length for length, share in zip(row, shares, strict=True) if share > 0), default=0)
        tokens = sum(length * share * many for length, share in zip(row, shares, strict=True))
        area = sum(plain(n).area * share * many for n, share in zip(row, shares, strict=True))
        iterations = max(longest, tokens / 64, area / 1e6)
        return cost.fixed_s * iterations + (cost.token_s + cost.sequence_s) * tokens + 1e-8 * area

    alone_s = max(row) * min(cost.decode_token_s(1, 0) for cost in costs)
    order = sorted(costs, key=lambda cost: cost.decode_token_s(1, 0))
    cuts = [part / 4 for part in range(4 * len(row) + 1)]
    best_s = math.inf
    for between in itertools.combinations_with_replacement(cuts, engines - 1):
        edges = [0.0, *between, float(len(row))]
        parts = [
            [max(0.0, min(high, i + 1) - max(low, i)) for i in range(len(row))]
            for low, high in itertools.pairwise(edges)
        ]
        best_s = min(best_s, max(end_s(cost, shares) for cost, shares in zip(order, parts, strict=True)))
    # Lengths within five per cent are in one class; the bisection stops at half a per cent.
    assert found_s <= 1.06 * max(best_s, alone_s)
    finer_s = best_s if engines == 1 else 0.7 * best_s  # cuts by quarters of a length are not the finest
    assert found_s >= 0.94 * max(finer_s, alone_s)


def test_an_engine_that_has_enough_takes_nobody_and_does_not_count() -> None:
    sums = LengthSums()
    sums.add(100, plain(100))
    busy = BacklogLeft(1000.0, 10.0, 0.0, 0.0)
    free = BusyEngine(COST, 8, 1e6, IDLE)
    alone_s = makespan_estimate_s(sums.longest_first(), [free])
    assert makespan_estimate_s(sums.longest_first(), [BusyEngine(COST, 8, 1e6, busy), free]) == pytest.approx(
        alone_s, rel=0.01
    )
    assert makespan_estimate_s([], [free]) == 0.0


@given(st.lists(st.tuples(st.integers(1, 10_000), st.booleans()), max_size=30))
def test_sums_by_length_are_those_of_who_is_there(rows: list[tuple[int, bool]]) -> None:
    sums = LengthSums()
    for tokens, _ in rows:
        sums.add(tokens, plain(tokens))
    for tokens, leaves in rows:
        if leaves:
            sums.remove(tokens, plain(tokens))
    stay = [plain(tokens) for tokens, leaves in rows if not leaves]
    found = sums.longest_first()
    assert sum(group.members for group in found) == len(stay)
    assert sum(group.items.tokens for group in found) == pytest.approx(sum(ask.tokens for ask in stay), abs=1e-6)
    means = [group.items.tokens / group.members for group in found]
    assert means == sorted(means, reverse=True)


@pytest.mark.parametrize(("tools_s", "iterations"), [(0.0, 100.0), (50.0, 200.0), (95.0, 1000.0), (500.0, 1000.0)])
def test_tools_take_time_from_the_tokens(tools_s: float, iterations: float) -> None:
    assert iterations_of(100.0, tools_s, 100.0) == pytest.approx(iterations)


def test_the_clock_tells_how_far_a_running_step_is() -> None:
    stage = Stage()
    stage.feed(ev.EngineJoined, engine_of("A", slots=4))
    for name in "ab":
        stage.feed(ev.TrajectorySubmitted, trajectory_spec(name, 10))
        stage.feed(ev.StepRequested, step_of(name, 0, context=10))
    (engine,) = stage.state.engines.values()
    residents = [stage.trajectory(name) for name in "ab"]
    assert unseen_tokens(engine, residents, COST, stage.at) == {}, "neither has begun"
    stage.feed(ev.StepStarted, StepId(TrajectoryId("a"), 0, 0), "A")
    asked_at = residents[0].requested_at
    cost = EngineCost(fixed_s=0.1)
    assert unseen_tokens(engine, residents, cost, asked_at + 5.0) == {"a": 0.0}, "its length is unknown"
    residents[0].prediction = Prediction(200.0, 200.0)
    assert unseen_tokens(engine, residents, cost, asked_at + 5.0) == {"a": pytest.approx(50.0)}
    assert unseen_tokens(engine, residents, cost, asked_at + 500.0) == {"a": pytest.approx(194.0)}, "it has not ended"
