"""Migration strategies behind a controller: when the priced rule and the rank rule move a trajectory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds.core_builders import Stage, action_of, engine_of, settle

from heddle_dask.core import events as ev
from heddle_dask.core.commands import Command, MoveContext, RunAction
from heddle_dask.core.ids import EngineId
from heddle_dask.strategies.migration.priced import Priced, expected_tool_s
from heddle_dask.strategies.migration.rank_rule import RankRule

E1, E2 = EngineId("E1"), EngineId("E2")


def crowded_home(
    strategies: str, *, kv_transfer: bool = True, degrees: tuple[int, int] = (1, 1)
) -> tuple[Stage, list[Command]]:
    """Eight long trajectories on E1, none on E2; one more on E1 has a new prediction."""
    stage = Stage("heddle", overrides=[f"migration={strategies}", "admission=unlimited"])
    for name, degree in zip(("E1", "E2"), degrees, strict=True):
        made = engine_of(name, slots=2, max_context_tokens=40_000, kv_tokens=400_000, kv_transfer=kv_transfer)
        stage.feed(ev.EngineJoined, replace(made, tp_degree=degree))
    for number in range(8):
        name = f"t{number}"
        stage.submit(name)
        stage.predict(name, 4000)
        stage.state.set_home(stage.trajectory(name), E1)
        stage.finish(stage.placed(name))
    return stage, settle(stage, "a", "E1", tokens=4000)


@pytest.mark.parametrize(("kv_transfer", "kinds"), [(True, {"transfer", "recompute"}), (False, {"recompute"})])
def test_priced_leaves_a_crowded_engine(kv_transfer: bool, kinds: set[str]) -> None:
    _, (move,) = crowded_home("priced", kv_transfer=kv_transfer)
    assert isinstance(move, MoveContext)
    assert (move.source_engine_id, move.target_engine_id) == (E1, E2)
    assert move.kind in kinds


def test_priced_transfers_no_kv_between_different_tp_degrees() -> None:
    free = "priced,setup_s=0.0,token_s=0.0"
    identical, heterogeneous = (crowded_home(free, degrees=degrees)[1] for degrees in ((1, 1), (1, 2)))
    assert [[move.kind for move in moves if isinstance(move, MoveContext)] for moves in (identical, heterogeneous)] == [
        ["transfer"],
        ["recompute"],
    ]


def test_priced_stays_when_the_gain_is_below_its_margin_or_all_moves_are_spent() -> None:
    assert crowded_home("priced,absolute_s=1000000.0")[1] == []
    assert crowded_home("priced,max_moves=0")[1] == []


def test_a_call_hides_what_calls_of_its_tool_have_taken() -> None:
    stage = Stage("heddle", overrides=["admission=unlimited"])
    stage.join("E1")
    stage.add_host("H1", 8)
    stage.submit("a", "b")
    for name in "ab":
        stage.finish(stage.placed(name))
    told = [expected_tool_s(stage.controller.view, stage.trajectory("a"))]
    for number, label in enumerate(("grep", "build")):
        request = replace(action_of(f"x{number}", "b"), label=label)
        (run, _) = stage.feed(ev.ActionRequested, request)
        assert isinstance(run, RunAction)
        stage.feed(ev.ActionFinished, run.action_id, run.host_id, 1.0 + 29.0 * number, True)
    told.append(expected_tool_s(stage.controller.view, stage.trajectory("a")))
    told.append(expected_tool_s(stage.controller.view, stage.trajectory("b")))
    for number, label in enumerate(("unheard of", "grep", "build")):
        stage.feed(ev.ActionRequested, replace(action_of(f"y{number}", "a"), label=label))
        told.append(expected_tool_s(stage.controller.view, stage.trajectory("a")))
    # Nothing is known; of others only; its own mean; then of the tools that run the longest.
    assert told == [0.0, 0.0, 15.5, 0.0, 1.0, 30.0]


def test_only_moves_that_start_count_against_the_most_moves() -> None:
    """A move that a quick tool called off has cost nothing."""
    stage, (busy,) = crowded_home("priced,max_moves=1")
    for index in range(1, 4):
        assert stage.predict("t0", 4000) == [], "its move waits for the ends"
        stage.finish(stage.placed("t0", index))
    assert stage.trajectory("t0").moves == 0
    assert isinstance(busy, MoveContext)
    stage.moved(busy)
    (move,) = stage.predict("t0", 4000)
    assert isinstance(move, MoveContext)
    assert (move.trajectory_id, stage.trajectory("t0").moves) == ("t0", 1)


def test_priced_starts_a_move_at_once_or_not_at_all() -> None:
    stage, (busy,) = crowded_home("priced")
    assert isinstance(busy, MoveContext)
    assert stage.predict("t0", 4000) == [], "both ends are busy"
    assert stage.moved(busy) == [], "its tool may be over before a move that begins now"
    (move,) = stage.predict("t0", 4000)
    assert isinstance(move, MoveContext)


def test_priced_keeps_nothing_of_trajectories_that_have_ended() -> None:
    stage, _ = crowded_home("priced")
    migration = stage.controller.strategies.migration
    assert isinstance(migration, Priced)
    for name in [*(f"t{number}" for number in range(8)), "a"]:
        stage.end(name)
    stage.submit("z")
    stage.finish(stage.placed("z"))
    stage.predict("z", 10)
    assert "t0" not in repr(migration)


def test_the_rank_rule_ranks_the_active_only() -> None:
    stage = Stage("heddle-paper")
    stage.join("E1", "E2")
    for name in "abcd":
        stage.submit(name)
        stage.predict(name, 100)
    for name in "abcd":
        stage.finish(stage.placed(name))
        stage.predict(name, 100)
    migration = stage.controller.strategies.migration
    assert isinstance(migration, RankRule)
    assert len(migration._order) == 4
    stage.end("a")
    stage.end("b")
    assert len(migration._order) == 2


def test_the_rank_rule_moves_a_trajectory_to_the_engine_of_its_new_rank() -> None:
    stage = Stage("heddle-paper")
    stage.join("E1", "E2")
    lengths = {"a": 4000, "b": 3900, "c": 20, "d": 10}
    for name, tokens in lengths.items():
        stage.submit(name)
        stage.predict(name, tokens)
    for name in lengths:
        stage.finish(stage.placed(name))
    homes = {name: stage.trajectory(name).home for name in lengths}
    assert homes["a"] != homes["d"], "the plan parts long from short"
    moves = []
    for name, tokens in {"d": 9000, "c": 8000, "b": 2, "a": 1}.items():  # all turned round
        moves += stage.predict(name, tokens)
        moves += [c for m in moves[-1:] if isinstance(m, MoveContext) for c in stage.moved(m)]
    assert moves, "at least one trajectory moves"
    assert all(isinstance(move, MoveContext) for move in moves)
