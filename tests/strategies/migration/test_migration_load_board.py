"""The board of loads decides as pricing every engine does, and prices few."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.priced_moves import decide_move

from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.migration import load_board
from heddle_dask.strategies.migration.load_board import LoadBoard
from heddle_dask.strategies.migration.pricing import EngineLoad, Link, Margin, MovingCandidate

FAST = EngineCost(fixed_s=0.005, sequence_s=4e-5, prefill_token_s=1e-5, context_token_s=1.5e-8)
SMALL = EngineCost(fixed_s=0.01, sequence_s=1e-3, prefill_token_s=1e-3, capacity_tokens=60_000)
COSTS = (FAST, SMALL)


@dataclass
class Sums:
    """What one engine holds."""

    residents: int
    kv_tokens: int
    remaining: float
    longest: float
    kind: int = 0
    slots: int = 8
    load: EngineLoad = field(init=False)


def boards(held: list[Sums]) -> tuple[LoadBoard, list[EngineLoad]]:
    """The board, and the loads that it stands for."""
    facts = [(EngineId(f"e{j}"), COSTS[sums.kind], sums.slots, 50_000 * (1 + sums.kind)) for j, sums in enumerate(held)]
    board = LoadBoard(facts)
    loads = []
    for j, (sums, (name, cost, slots, most)) in enumerate(zip(held, facts, strict=True)):
        board.set(j, sums.residents, sums.kv_tokens, sums.remaining, sums.longest)
        loads.append(
            EngineLoad(
                name,
                cost,
                slots,
                sums.residents,
                sums.remaining,
                sums.longest,
                float(sums.kv_tokens),
                1.0,
                most,
            )
        )
    return board, loads


engines = st.lists(
    st.builds(
        Sums,
        residents=st.integers(0, 40),
        kv_tokens=st.sampled_from([0, 500, 5000]) | st.integers(0, 80_000),
        remaining=st.sampled_from([0.0, 1000.0]) | st.floats(0, 1e5),
        longest=st.sampled_from([0.0, 1000.0]) | st.floats(0, 2e4),
        kind=st.integers(0, 1),
        slots=st.sampled_from([1, 8, 100]),
    )
    | st.builds(Sums, st.just(0), st.just(0), st.just(0.0), st.just(0.0), st.integers(0, 1)),
    min_size=1,
    max_size=80,  # more than one block
)


@settings(max_examples=400, deadline=None)
@given(
    engines,
    st.integers(-1, 11),
    # Not with 1e-227 tokens left: then both take equally long everywhere, except for rounding.
    st.just(0.0) | st.floats(1e-3, 2e4),
    st.floats(0, 6e4),
    st.sampled_from([0.0, 1.0]) | st.floats(0, 50),
    st.none() | st.builds(Link, st.floats(0, 1), st.floats(0, 1e-4)),
    st.builds(Margin, st.floats(0, 0.5), st.floats(0, 5), st.integers(0, 2), st.floats(0.2, 1)),
)
def test_it_decides_as_pricing_every_engine_does(
    held: list[Sums],
    home: int,
    remaining: float,
    context: float,
    tool_s: float,
    link: Link | None,
    margin: Margin,
) -> None:
    board, loads = boards(held)
    one = MovingCandidate(TrajectoryId("t"), remaining, context, EngineId(f"e{home}"), tool_s)
    assert board.decide(one, link, margin) == decide_move(one, loads, link, margin)
    # What is set again counts, whatever the blocks remember.
    j = len(held) // 2
    for number, sums in ((j, Sums(0, 0, 0.0, 0.0)), (0, Sums(40, 60_000, 9e4, 2e4))):
        board.set(number, sums.residents, sums.kv_tokens, sums.remaining, sums.longest)
        load = loads[number]
        load.residents, load.kv_tokens = sums.residents, float(sums.kv_tokens)
        load.remaining_tokens, load.longest_tokens = sums.remaining, sums.longest
        assert board.decide(one, link, margin) == decide_move(one, loads, link, margin)


def test_it_prices_few_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    priced = []
    real = load_board.price_move

    def counted(candidate, target, *rest):  # type: ignore[no-untyped-def]
        priced.append(target.engine_id)
        return real(candidate, target, *rest)

    monkeypatch.setattr(load_board, "price_move", counted)
    even = [Sums(40, 40_000, 40_000.0 + j, 1000.0) for j in range(64)]
    board, _ = boards([Sums(90, 90_000, 90_000.0, 1000.0), *even])
    for home, moves in (("e0", True), ("e5", False)):
        priced.clear()
        one = MovingCandidate(TrajectoryId("t"), 900.0, 1000.0, EngineId(home), 5.0)
        assert (board.decide(one, Link(0.1, 1e-6), Margin()) is not None) is moves
        assert len(priced) <= 3
