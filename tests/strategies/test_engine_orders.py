"""Engines found by id, those that were touched since, and those that hold least: against walks over all."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from worlds.core_builders import engine_of

from heddle_dask.core.engine_list import EngineList, engine_among
from heddle_dask.core.entities import Engine
from heddle_dask.core.ids import EngineId
from heddle_dask.core.state import State
from heddle_dask.strategies.admission.least_held import LeastHeld
from heddle_dask.strategies.placement.least_load import inflight_load, pick_least

ENGINES = [Engine(engine_of(f"E{number}"), number) for number in range(6)]


def test_an_engine_is_found_in_any_sequence() -> None:
    others = EngineList(ENGINES[:3])
    for engine in ENGINES:
        there = engine if engine in ENGINES[:3] else None
        assert engine_among(others, engine.engine_id) is there
        assert engine_among(ENGINES[:3], engine.engine_id) is there
    assert engine_among(others, None) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=40))
def test_each_who_asks_hears_of_every_touch_once(steps: list[tuple[int, int]]) -> None:
    state = State()
    seen = [0, 0]
    unheard: list[set[str]] = [set(), set()]
    for number, what in steps:
        if what == 2:
            state.touch(ENGINES[number])
            for names in unheard:
                names.add(ENGINES[number].engine_id)
            continue
        names, seen[what] = state.touched_since(seen[what])
        assert len(names) == len(set(names))
        assert set(names) == unheard[what]
        unheard[what].clear()


@given(
    st.lists(st.integers(0, 5), max_size=6, unique=True),
    st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 4)), max_size=60),
)
def test_the_least_held_is_first_whatever_changed(first: list[int], steps: list[tuple[int, int]]) -> None:
    held = {ENGINES[number].engine_id: 1.0 for number in first}
    order = LeastHeld((ENGINES[number], 1.0) for number in first)
    number_of = {engine.engine_id: engine.number for engine in ENGINES}

    def least() -> EngineId | None:
        return min(held, key=lambda name: (held[name], number_of[name]), default=None)

    for number, share in steps:
        name = ENGINES[number].engine_id
        if share >= 0:
            held[name] = float(share)
            order.put(ENGINES[number], float(share))
        elif name in held:
            del held[name]
            order.drop(name)
        found = order.least()
        assert (None if found is None else found.engine_id) == least()
        assert len(order) == len(held) and (name in order) == (name in held)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8), st.integers(0, 99))
def test_the_least_loaded_is_one_of_those_with_the_least_load(rows: list[tuple[int, int]], seed: int) -> None:
    engines = [Engine(engine_of(f"E{number}"), number) for number in range(len(rows))]
    for engine, (tokens, steps) in zip(engines, rows, strict=True):
        engine.inflight_tokens = tokens
        engine.inflight = dict.fromkeys(str(step) for step in range(steps))  # type: ignore[assignment]
    least = min(inflight_load(engine) for engine in engines)
    ties = [engine for engine in engines if inflight_load(engine) == least]
    expected = ties[0] if len(ties) == 1 else random.Random(seed).choice(ties)
    tokens = [engine.inflight_tokens / engine.spec.slots for engine in engines]
    assert pick_least(engines, tokens, inflight_load, random.Random(seed)) is expected
