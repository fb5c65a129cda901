"""Events and commands as lists, there and back, and the replay that compares."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.core_builders import Stage
from worlds.core_world import WORLDS, play, strategies_of
from worlds.integrity import check_integrity

from heddle_dask.core.commands import Command, StartStep
from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput
from heddle_dask.core.events import Event
from heddle_dask.core.ids import EngineId, StepId, TrajectoryId
from heddle_dask.core.journal_codec import decode, encode, replay
from heddle_dask.core.nouns import Priority
from heddle_dask.core.resources import ApiQuota, QuotaWindow
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.strategies.presets import build_strategies

KINDS = (*get_args(Event), *get_args(Command))
finite = st.floats(-1e12, 1e12)


def anything_of(kind: type) -> st.SearchStrategy[Any]:
    """Every value of a type that events and commands are made of."""
    if kind is RetryPolicy:  # it refuses most numbers
        return st.builds(RetryPolicy, max_losses=st.integers(0, 9), max_step_attempts=st.integers(1, 9))
    if kind is QuotaWindow:
        return st.builds(QuotaWindow, most=st.integers(1, 100), seconds=st.floats(0.001, 1e6))
    if kind is ApiQuota:
        return st.builds(
            ApiQuota,
            name=st.text(min_size=1),
            concurrency=st.integers(0, 100),
            windows=st.lists(anything_of(QuotaWindow), max_size=3).map(tuple),
        )
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return st.builds(kind, **{name: anything_of(hint) for name, hint in get_type_hints(kind).items()})
    simple = {float: finite, int: st.integers(), bool: st.booleans(), str: st.text()}
    if kind in simple:
        return simple[kind]
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        if others == [...]:
            return st.lists(anything_of(first), max_size=3).map(tuple)
        return st.tuples(*map(anything_of, (first, *others)))
    if hasattr(kind, "__supertype__"):
        return st.text()
    return st.one_of([st.none() if option is NoneType else anything_of(option) for option in get_args(kind)])


@settings(deadline=None)
@given(st.one_of([anything_of(kind) for kind in KINDS]))
def test_decode_is_the_inverse_of_encode_through_json(item: Event | Command) -> None:
    row = json.loads(json.dumps(encode(item)))
    assert row[0] == type(item).__name__
    assert decode(row) == item
    assert encode(decode(row)) == row


def test_every_kind_of_event_and_command_is_known() -> None:
    assert len({kind.__name__ for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize(
    "row",
    [
        [],
        [None],
        [["EngineLost"]],
        ["EngineFound", 1.0],
        ["EngineLost", 1.0, "E1"],
        ["EngineLost", 1.0, "E1", "reason", True, "more"],
        ["EngineJoined", 1.0, ["E1", 4]],
        ["EngineJoined", 1.0, ["E1", 4, 4096, 1, 0, 0, False, 0.0, "", "", "", "more"]],
    ],
)
def test_a_row_of_another_version_is_bad_input(row: list[Any]) -> None:
    with pytest.raises(BadInput, match="is not of this version"):
        decode(row)


def test_no_field_of_an_event_defaults_to_a_mutable() -> None:
    for kind in KINDS:
        assert all(f.default_factory is MISSING for f in fields(kind))


def test_a_start_without_a_source_survives() -> None:
    start = StartStep(StepId(TrajectoryId("a"), 1, 2), EngineId("E1"), Priority(0, 3.0), order=3)
    assert decode(json.loads(json.dumps(encode(start)))) == start


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), preset=st.sampled_from(sorted(WORLDS)))
def test_a_replay_of_a_random_world_gives_the_same_commands(seed: int, preset: str) -> None:
    overrides = ["admission=at-most,alive=5"] if seed % 2 else []
    world = play(preset, seed=seed, moves=150, overrides=overrides)
    lines = json.loads(json.dumps(world.stage.journal))
    fresh = Controller(strategies_of(preset, seed=seed, overrides=overrides), world.retries)
    assert list(replay(fresh, lines)) == []
    assert fresh.moves.totals == world.stage.controller.moves.totals
    check_integrity(fresh.state)
    assert fresh.state.stale_events == world.stage.state.stale_events


@pytest.mark.parametrize("preset", ["heddle", "heddle-paper"])
def test_a_replay_of_what_is_new_in_heddle_gives_the_same_commands(preset: str) -> None:
    """Predictions, plans, preemptions and moves are in the journal, and nothing else is needed."""
    seen: Counter[str] = Counter()
    for seed in range(1, 40, 2):
        world = play(preset, seed=seed, moves=300)
        seen += world.seen
        fresh = Controller(build_strategies(preset, seed=seed), world.retries)
        assert list(replay(fresh, json.loads(json.dumps(world.stage.journal)))) == []
    assert seen["preempted"] and seen["prediction came late"]
    assert seen["move by recompute"] + seen["move by transfer"]


def test_a_replay_tells_where_it_differs() -> None:
    stage = Stage("sticky", overrides=["placement=round-robin"])
    stage.join("E1", "E2")
    stage.submit("a", "b")
    stage.placed("a")
    stage.placed("b")
    lines = json.loads(json.dumps(stage.journal))
    lines[5][1][0][2] = "E1"
    (mismatch,) = replay(Controller(build_strategies("sticky", overrides=["placement=round-robin"])), lines)
    assert mismatch.line == 6
    assert mismatch.event[0] == "StepRequested"
    assert mismatch.recorded[0][2] == "E1"
    assert mismatch.replayed[0][2] == "E2"


def test_a_replay_with_another_strategy_is_told() -> None:
    told = []
    for seed in range(6):
        world = play("least-load", seed=seed, moves=200)
        fresh = Controller(build_strategies("sticky"), world.retries)
        told += [next(replay(fresh, world.stage.journal), None)]
    assert any(mismatch is not None and mismatch.replayed[0][0] == "StartStep" for mismatch in told)
