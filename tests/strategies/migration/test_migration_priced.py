"""Priced migration: what each option costs, when it is clearly better, and that it does not swing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.priced_moves import decide_move

from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.migration.pricing import EngineLoad, Link, Margin, MovingCandidate
from heddle_dask.strategies.partition.work import Work, WorkLoad

HOME, AWAY, FAR = EngineId("home"), EngineId("away"), EngineId("far")
COST = EngineCost(fixed_s=0.01, sequence_s=0.001, prefill_token_s=1e-3, capacity_tokens=100_000)
NO_MARGIN = Margin(relative=0.0, absolute_s=0.0)


def load_of(name: EngineId, *remaining: float, context: float = 1000, cost: EngineCost = COST) -> EngineLoad:
    """An engine of 8 slots whose residents need `remaining` tokens each."""
    return EngineLoad(
        name,
        cost,
        slots=8,
        residents=len(remaining),
        remaining_tokens=sum(remaining),
        longest_tokens=max(remaining, default=0.0),
        kv_tokens=context * len(remaining),
    )


def candidate(remaining: float = 1000, context: float = 1000, tool_s: float = 0.0, **more: object) -> MovingCandidate:
    return MovingCandidate(TrajectoryId("t"), remaining, context, HOME, tool_s, **more)  # type: ignore[arg-type]


CROWDED = load_of(HOME, *[1000.0] * 16)


def test_it_leaves_a_crowded_home_for_an_empty_engine() -> None:
    move = decide_move(candidate(), [CROWDED, load_of(AWAY)], None, Margin())
    assert move is not None
    assert (move.target, move.kind) == (AWAY, "recompute")
    # 16 of 1,000 tokens on 8 slots: 2,000 iterations; alone: 1,000, and 1,000 prompt tokens at 1 ms.
    assert move.stay_s == pytest.approx(2000 * 0.01 + 16_000 * 0.001)
    assert move.price_s == pytest.approx(0.01 + 1.0)
    assert move.move_s == pytest.approx(1000 * 0.01 + 1000 * 0.001 + move.price_s)
    assert move.gain_s == move.stay_s - move.move_s


def test_it_stays_where_it_is_alone() -> None:
    assert decide_move(candidate(), [load_of(HOME, 1000.0), load_of(AWAY)], Link(0.0, 0.0), NO_MARGIN) is None


def test_the_tool_hides_the_price() -> None:
    for tool_s, exposed_s in ((0.0, 1.01), (0.6, 0.41), (5.0, 0.0)):
        move = decide_move(candidate(tool_s=tool_s), [CROWDED, load_of(AWAY)], None, Margin())
        assert move is not None and move.exposed_s == pytest.approx(exposed_s)
        assert move.move_s == pytest.approx(tool_s + exposed_s + 11.0)


def test_the_cheaper_of_transfer_and_recomputation() -> None:
    kinds = []
    for link in (Link(0.2, 1e-6), Link(3.0, 1e-6), None):
        move = decide_move(candidate(), [CROWDED, load_of(AWAY)], link, Margin())
        assert move is not None
        kinds.append(move.kind)
    assert kinds == ["transfer", "recompute", "recompute"]


def test_a_prefix_that_is_there_already_is_not_paid_for() -> None:
    loads = [CROWDED, load_of(AWAY), load_of(FAR)]
    move = decide_move(candidate(cached_tokens={FAR: 900.0}), loads, None, Margin())
    assert move is not None
    assert (move.target, move.price_s) == (FAR, pytest.approx(0.11))


def test_clearly_means_both_margins() -> None:
    loads = [CROWDED, load_of(AWAY)]
    gain = decide_move(candidate(), loads, None, NO_MARGIN)
    assert gain is not None
    share = gain.gain_s / gain.stay_s
    for margin, moves in (
        (Margin(relative=share * 0.99, absolute_s=gain.gain_s * 0.99), True),
        (Margin(relative=share * 1.01, absolute_s=0.0), False),
        (Margin(relative=0.0, absolute_s=gain.gain_s * 1.01), False),
    ):
        assert (decide_move(candidate(), loads, None, margin) is not None) is moves


def test_a_target_without_room_for_its_end_is_left_out() -> None:
    small = EngineCost(fixed_s=0.01, sequence_s=0.001, prefill_token_s=1e-3, capacity_tokens=1_999)
    exact = EngineCost(fixed_s=0.01, sequence_s=0.001, prefill_token_s=1e-3, capacity_tokens=2_000)
    assert decide_move(candidate(), [CROWDED, load_of(AWAY, cost=small)], None, Margin()) is None
    assert decide_move(candidate(), [CROWDED, load_of(AWAY, cost=exact)], None, Margin()) is not None


def test_a_target_that_would_become_the_last_one_is_left_out() -> None:
    """It would end earlier there itself, but the target has a longer way to go than the home."""
    home = load_of(HOME, *[1000.0] * 16)
    away = load_of(AWAY, 6000.0)
    assert away.finish_s(1000, 1000) < home.without(1000, 1000).finish_s(1000, 1000)
    assert decide_move(candidate(), [home, away], None, NO_MARGIN) is None


def test_no_home_no_work_no_moves_left() -> None:
    loads = [CROWDED, load_of(AWAY)]
    assert decide_move(candidate(), loads[1:], None, NO_MARGIN) is None
    assert decide_move(candidate(remaining=0), loads, None, NO_MARGIN) is None
    assert decide_move(candidate(moved=4), loads, None, NO_MARGIN) is None


lists = st.lists(st.floats(1, 5000), max_size=12)


@given(lists, lists, st.floats(1, 5000), st.floats(0, 20_000), st.floats(0, 20))
def test_it_does_not_swing_back(
    home: list[float], away: list[float], remaining: float, context: float, tool_s: float
) -> None:
    """After a move nothing speaks for going back at once, even without a margin: the prices are never negative."""
    loads = [load_of(HOME, *home, remaining), load_of(AWAY, *away)]
    one = candidate(remaining, context, tool_s)
    move = decide_move(one, loads, None, NO_MARGIN)
    if move is None:
        return
    assert move.move_s <= move.stay_s and move.exposed_s == max(0.0, move.price_s - tool_s)
    moved = MovingCandidate(one.trajectory_id, remaining, context, AWAY, tool_s)
    after = [load_of(HOME, *home), load_of(AWAY, *away, remaining)]
    back = decide_move(moved, after, None, Margin(relative=0.0, absolute_s=1e-6))
    assert back is None


@given(st.lists(st.floats(1, 5000), min_size=1, max_size=12), st.floats(1, 5000))
def test_finish_and_drain_are_those_of_the_work_model(others: list[float], remaining: float) -> None:
    """With KV read for free drain is exact; finish is not later, and equal for the longest."""
    context = 1000.0
    load = load_of(AWAY, *others, context=context)
    works = [Work("g", tokens, context) for tokens in (*others, remaining)]
    assert load.drain_s(remaining, context) == pytest.approx(WorkLoad.of(COST, 8, works).seconds)
    finish_s = load.finish_s(remaining, context)
    assert finish_s <= load.drain_s(remaining, context) * (1 + 1e-9)
    if remaining >= max(others):
        assert finish_s == pytest.approx(load.drain_s(remaining, context))


@given(lists, st.floats(1, 5000), st.floats(1, 5000))
def test_more_company_never_ends_it_earlier(others: list[float], more: float, remaining: float) -> None:
    before, after = load_of(AWAY, *others), load_of(AWAY, *others, more)
    assert after.finish_s(remaining, 10.0) >= before.finish_s(remaining, 10.0) * (1 - 1e-9)
