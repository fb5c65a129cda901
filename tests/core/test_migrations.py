"""Moves of contexts between engines, as lists of events and commands: all their possible ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from worlds.core_builders import Restless, Stage, move_facts, settle

from heddle_dask.core import events as ev
from heddle_dask.core.commands import MoveContext, ReleaseEngine, RunAction, StartStep
from heddle_dask.core.entities import Trajectory
from heddle_dask.core.errors import GuardViolation
from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.core.migrations import MoveTotals
from heddle_dask.core.transitions import KvState, TrajectoryState
from heddle_dask.core.view import ClusterView, Migration, Move, MoveRequest, PredictorChoice
from heddle_dask.strategies.migration.priced import choose_transfers
from heddle_dask.strategies.presets import build_strategies

E1, E2, E3 = EngineId("E1"), EngineId("E2"), EngineId("E3")
A = TrajectoryId("a")


@dataclass
class Going:
    """Moves each trajectory to where the test says; nowhere else."""

    to: dict[str, str]
    kind: str = "transfer"
    may_wait: bool = True

    def propose(self, view: ClusterView, trajectory: Trajectory) -> Move | None:
        target = self.to.get(trajectory.trajectory_id)
        return None if target is None else Move(EngineId(target), self.kind, may_wait=self.may_wait)

    def choose(self, waiting: Sequence[MoveRequest], running: Sequence[MoveRequest]) -> Sequence[MoveRequest]:
        return choose_transfers(waiting, running)


def moving_stage(migration: Migration, *engines: str) -> Stage:
    """Trajectories stay where they are but for that migration."""
    oracle = PredictorChoice("oracle", {})
    chosen = replace(
        build_strategies("sticky", overrides=["placement=round-robin"]), migration=migration, predictor=oracle
    )
    chosen.placement = build_strategies("sticky-least-loaded").placement
    stage = Stage(strategies=chosen)
    stage.join(*(engines or ("E1", "E2")))
    return stage


def moving(kind: str = "transfer", *engines: str) -> tuple[Stage, MoveContext]:
    """Trajectory a is on its way from E1 to E2 while its tool runs."""
    stage = moving_stage(Going({"a": "E2"}, kind), *engines)
    (move,) = settle(stage, "a", "E1")
    assert move == MoveContext(A, E1, E2, kind)
    return stage, move


def home_and_kv(stage: Stage, name: str = "a") -> tuple[str | None, KvState]:
    record = stage.trajectory(name)
    return record.home, record.kv


# -- the plain course ------------------------------------------------------------------------------------


def test_a_move_that_ends_during_the_tool_brings_the_next_step_to_the_target() -> None:
    stage, move = moving()
    assert home_and_kv(stage) == (E1, KvState.MOVING)
    assert stage.trajectory("a").kept_on == E1
    assert stage.moved(move, seconds=0.25) == []
    assert home_and_kv(stage) == (E2, KvState.RESIDENT)
    assert (stage.trajectory("a").kept_on, stage.trajectory("a").kept_tokens) == (E2, 110)
    assert (stage.engine("E1").resident_tokens, stage.engine("E2").resident_tokens) == (0, 110)
    step = stage.placed("a", 1)
    assert (step.engine_id, step.source_engine_id) == (E2, E2)
    assert stage.controller.moves.totals == {
        "transfer": MoveTotals(started=1, failed=0, seconds=0.25, tokens=100, exposed_s=0.0)
    }
    assert stage.trajectory("a").moves == 1


def test_a_trajectory_is_asked_about_only_at_rest_and_with_its_kv_in_place() -> None:
    migration = Restless()
    stage = moving_stage(migration)
    stage.submit("a")
    stage.predict("a", 10)  # nowhere yet
    step = stage.generating("a")
    stage.predict("a", 10)  # generating
    assert migration.asked == 0
    stage.finish(step)
    (move,) = stage.predict("a", 10)
    assert isinstance(move, MoveContext)
    assert stage.predict("a", 20) == []  # moving
    assert migration.asked == 1


def test_no_migration_no_move() -> None:
    stage = Stage(overrides=["predictor=oracle"])
    stage.join("E1", "E2")
    assert settle(stage, "a", "E1") == []


# -- the tool returns first ------------------------------------------------------------------------------


def test_a_tool_that_returns_before_the_move_has_started_calls_it_off() -> None:
    stage = moving_stage(Going({"a": "E2", "b": "E2"}), "E1", "E2", "E3")
    (first,) = settle(stage, "a", "E1")
    assert settle(stage, "b", "E3") == [], "E2 is busy"
    step = stage.placed("b", 1)
    assert (step.engine_id, step.source_engine_id) == (E3, E3)
    assert isinstance(first, MoveContext)
    assert stage.moved(first) == [], "b's move is off"
    assert stage.controller.moves.totals["transfer"].started == 1
    assert stage.trajectory("b").moves == 0


def test_a_tool_that_returns_while_the_context_moves_waits_and_is_placed_once() -> None:
    stage, move = moving()
    stage.at = 100.0
    assert stage.request("a", 1) == []  # at 101
    assert stage.trajectory("a").state is TrajectoryState.WAITING
    stage.at = 110.0
    (step,) = stage.moved(move)  # at 111
    assert isinstance(step, StartStep)
    assert (step.engine_id, step.step_id.step_index) == (E2, 1)
    totals = stage.controller.moves.totals["transfer"]
    assert (totals.exposed, totals.exposed_s) == (1, 10.0)
    stage.late(ev.MoveEnded, *move_facts(move))


@pytest.mark.parametrize(("run_s", "late"), [(0.4, 0), (0.6, 1)])
def test_an_exposed_move_is_late_if_its_tool_ran_longer(run_s: float, late: int) -> None:
    """0.5 s of moving; what its trajectory's earlier tools took does not count, nor what it waited for a host."""
    stage = moving_stage(Going({}))
    settle(stage, "a", "E1")
    (tool,) = stage.add_host("H1")
    assert isinstance(tool, RunAction)
    stage.acted(tool, 30.0)
    stage.finish(stage.generating("a", 1))
    stage.controller.strategies.migration = Going({"a": "E2"})
    (tool,) = (command for command in stage.act("second", "a") if isinstance(command, RunAction))
    (move,) = stage.predict("a", 100.0)
    assert isinstance(move, MoveContext)
    stage.acted(tool, run_s)
    assert stage.request("a", 2) == []
    stage.moved(move)
    totals = stage.controller.moves.totals["transfer"]
    assert (totals.exposed, totals.late) == (1, late)


def test_nothing_else_that_happens_places_a_step_whose_context_moves() -> None:
    stage, move = moving()
    assert stage.request("a", 1) == []
    assert stage.join("E4") == []
    stage.submit("b")
    step = stage.generating("b")
    assert all(not isinstance(command, StartStep) for command in stage.finish(step))
    (started,) = stage.moved(move)
    assert isinstance(started, StartStep)


def test_a_step_that_waited_for_a_move_that_failed_runs_at_home() -> None:
    stage, move = moving()
    stage.request("a", 1)
    (step,) = stage.moved(move, ok=False)
    assert isinstance(step, StartStep)
    assert step.engine_id == E1
    assert home_and_kv(stage) == (E1, KvState.RESIDENT)
    totals = stage.controller.moves.totals["transfer"]
    assert (totals.started, totals.failed, totals.exposed_s) == (1, 1, 1.0)


def test_the_blocks_time_out_during_the_tool_and_the_trajectory_stays() -> None:
    stage, move = moving()
    assert stage.moved(move, ok=False) == []
    assert home_and_kv(stage) == (E1, KvState.RESIDENT)
    assert stage.placed("a", 1).engine_id == E1


@pytest.mark.parametrize(("kind", "moved_bytes"), [("transfer", 2_000_000), ("recompute", 0)])
def test_bytes_are_those_of_the_kv_cache_that_was_copied(kind: str, moved_bytes: int) -> None:
    stage = moving_stage(Going({"a": "E2"}, kind))
    engine = stage.engine("E2")
    engine.spec = replace(engine.spec, kv_bytes_per_token=20_000.0)
    (move,) = settle(stage, "a", "E1")
    assert isinstance(move, MoveContext)
    stage.moved(move)
    totals = stage.controller.moves.totals[kind]
    assert (totals.tokens, totals.bytes) == (100, moved_bytes)


# -- an end dies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stranded", [True, False])
def test_a_target_that_dies_ends_the_move_and_the_waiting_step_runs_at_home(stranded: bool) -> None:
    stage, move = moving()
    stage.request("a", 1)
    stage.at = 50.0
    (step,) = stage.lose("E2", stranded=stranded)
    assert isinstance(step, StartStep)
    assert step.engine_id == E1
    totals = stage.controller.moves.totals["transfer"]
    assert (totals.failed, stage.controller.moves.running) == (1, 0)
    assert totals.exposed_s == 51.0 - stage.trajectory("a").requested_at
    stage.late(ev.MoveEnded, *move_facts(move, ok=False))


@pytest.mark.parametrize("stranded", [True, False])
def test_a_source_that_dies_ends_the_move_and_the_waiting_step_is_computed_anew(stranded: bool) -> None:
    stage, move = moving()
    stage.request("a", 1)
    stage.at = 50.0
    (step,) = stage.lose("E1", stranded=stranded)
    assert isinstance(step, StartStep)
    assert (step.engine_id, step.source_engine_id) == (E2, None)
    totals = stage.controller.moves.totals["transfer"]
    assert totals.failed == 1
    assert totals.exposed_s == 51.0 - stage.trajectory("a").requested_at, "it waited all the same"
    stage.late(ev.MoveEnded, *move_facts(move))


def test_an_end_that_dies_during_the_tool_leaves_nothing_behind() -> None:
    for lost, left in (("E1", (None, KvState.LOST)), ("E2", (E1, KvState.RESIDENT))):
        stage, move = moving()
        assert stage.lose(lost) == []
        assert home_and_kv(stage) == left
        stage.late(ev.MoveEnded, *move_facts(move))


def test_a_report_of_a_move_whose_source_died_is_not_taken_for_that_of_the_next_move() -> None:
    """The same trajectory to the same target, from elsewhere: only the source tells the two apart."""
    stage, early = moving("transfer", "E1", "E2", "E3")
    stage.lose("E1")
    stage.state.set_home(stage.trajectory("a"), E3)
    stage.finish(stage.generating("a", 1))
    (again,) = stage.predict("a", 50)
    assert again == MoveContext(A, E3, E2, "transfer")
    stage.late(ev.MoveEnded, *move_facts(early))
    assert home_and_kv(stage) == (E3, KvState.MOVING)
    stage.moved(again)
    assert home_and_kv(stage) == (E2, KvState.RESIDENT)


def test_a_target_that_drains_meanwhile_is_no_home() -> None:
    stage, move = moving()
    stage.feed(ev.EngineDraining, E2)
    assert stage.moved(move) == [ReleaseEngine(E2)]
    assert home_and_kv(stage) == (E1, KvState.RESIDENT)


def test_a_move_that_waits_is_off_when_an_end_of_it_drains_or_dies() -> None:
    for how in (ev.EngineDraining, ev.EngineLost):
        stage = moving_stage(Going({"a": "E2", "b": "E2", "c": "E3"}), "E1", "E2", "E3", "E4")
        (first,) = settle(stage, "a", "E1")
        assert settle(stage, "b", "E4") == []
        more = ("test", True) if how is ev.EngineLost else ()
        stage.feed(how, E2, *more)
        if how is ev.EngineDraining:
            assert isinstance(first, MoveContext)
            assert stage.moved(first) == [ReleaseEngine(E2)]
        assert stage.controller.moves.totals["transfer"].started == 1


# -- the trajectory ends ---------------------------------------------------------------------------------


def test_a_trajectory_that_ends_on_its_way_keeps_both_ends_busy_until_the_move_reports() -> None:
    stage = moving_stage(Going({"a": "E2", "b": "E3"}), "E1", "E2", "E3")
    (move,) = settle(stage, "a", "E1")
    assert isinstance(move, MoveContext)
    stage.end("a")
    assert settle(stage, "b", "E1") == [], "E1 still sends"
    assert stage.moved(move) == [MoveContext(TrajectoryId("b"), E1, E3, "transfer")]
    assert stage.controller.moves.totals["transfer"].exposed_s == 0.0


def test_a_trajectory_that_ends_before_its_move_has_started_is_not_moved() -> None:
    stage = moving_stage(Going({"a": "E2", "b": "E2"}), "E1", "E2", "E3")
    (first,) = settle(stage, "a", "E1")
    settle(stage, "b", "E3")
    stage.end("b")
    assert isinstance(first, MoveContext)
    assert stage.moved(first) == []


# -- several at once -------------------------------------------------------------------------------------


def test_moves_that_share_no_engine_run_at_once_and_the_longest_waits_least() -> None:
    stage = moving_stage(Going({"a": "E2", "b": "E4", "short": "E1", "long": "E1"}), "E1", "E2", "E3", "E4")
    (first,) = settle(stage, "a", "E1")
    (other,) = settle(stage, "b", "E3")
    assert stage.controller.moves.running == 2
    assert settle(stage, "short", "E2", tokens=10) == []
    assert settle(stage, "long", "E2", tokens=900) == []
    assert isinstance(first, MoveContext) and isinstance(other, MoveContext)
    assert stage.moved(other) == []
    (third,) = stage.moved(first)
    assert third == MoveContext(TrajectoryId("long"), E2, E1, "transfer")
    (fourth,) = stage.moved(third)
    assert fourth == MoveContext(TrajectoryId("short"), E2, E1, "transfer")


@pytest.mark.parametrize("may_wait", [True, False])
def test_a_move_that_may_not_wait_is_off_when_an_engine_is_busy(may_wait: bool) -> None:
    stage = moving_stage(Going({"a": "E2", "b": "E2"}, may_wait=may_wait), "E1", "E2", "E3")
    (first,) = settle(stage, "a", "E1")
    assert settle(stage, "b", "E3") == [], "E2 is busy"
    assert isinstance(first, MoveContext)
    second = MoveContext(TrajectoryId("b"), E3, E2, "transfer")
    assert stage.moved(first) == ([second] if may_wait else [])
    if not may_wait:
        assert stage.predict("b", 100) == [second], "asked again, with no move before it"


def test_a_newer_prediction_replaces_a_move_that_waits() -> None:
    plan = Going({"a": "E2", "b": "E2"})
    stage = moving_stage(plan, "E1", "E2", "E3", "E4")
    (first,) = settle(stage, "a", "E1")
    assert settle(stage, "b", "E3") == []
    plan.to["b"] = "E4"
    (second,) = stage.predict("b", 100)
    assert second == MoveContext(TrajectoryId("b"), E3, EngineId("E4"), "transfer")
    assert isinstance(first, MoveContext)
    assert stage.moved(first) == []


def test_tools_side_by_side_count_once_and_a_move_that_failed_is_not_late() -> None:
    """Three of 0.4 s at once are no 0.6 s in which a move of 0.5 s could have hidden."""
    stage = moving_stage(Going({}), "E1", "E2")
    settle(stage, "a", "E1")
    (tool,) = stage.add_host("H1")
    assert isinstance(tool, RunAction)
    stage.acted(tool, 0.0)
    record = stage.trajectory("a")
    record.take_action("x", 0.4, True, 200.0)
    record.take_action("x", 0.4, True, 200.05)
    record.take_action("x", 0.4, True, 200.1)
    assert record.resting_tools_s == pytest.approx(0.5)
    assert record.tools_s == pytest.approx(1.2)
    stage, move = moving()
    record = stage.trajectory("a")
    record.take_action("x", 30.0, True, 40.0)
    stage.request("a", 1)
    stage.lose("E2", stranded=False)
    totals = stage.controller.moves.totals["transfer"]
    assert (totals.exposed, totals.failed, totals.late) == (1, 1, 0)
    stage.late(ev.MoveEnded, *move_facts(move))


def test_totals_are_kept_by_kind() -> None:
    plan = Going({"a": "E2", "b": "E2"})
    stage = moving_stage(plan)
    (first,) = settle(stage, "a", "E1")
    assert isinstance(first, MoveContext)
    stage.moved(first, seconds=2.0)
    plan.kind = "recompute"
    (second,) = settle(stage, "b", "E1")
    assert isinstance(second, MoveContext)
    stage.moved(second, ok=False, seconds=3.0)
    assert stage.controller.moves.totals == {
        "transfer": MoveTotals(1, 0, 2.0, 100, 0.0),
        "recompute": MoveTotals(1, 1, 3.0, 0, 0.0),
    }


# -- guards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["E1", "E9", "E3"])
def test_a_move_to_its_home_to_nowhere_or_to_a_draining_engine_is_refused(target: str) -> None:
    stage = moving_stage(Going({"a": target}), "E1", "E2", "E3")
    stage.feed(ev.EngineDraining, E3)
    with pytest.raises(GuardViolation, match=f"migration chose {target} for a at E1"):
        settle(stage, "a", "E1")


class AllAtOnce(Going):
    """Starts every move, whatever runs."""

    def choose(self, waiting: Sequence[MoveRequest], running: Sequence[MoveRequest]) -> Sequence[MoveRequest]:
        return waiting


def test_two_moves_that_share_an_engine_are_refused() -> None:
    stage = moving_stage(AllAtOnce({"a": "E2", "b": "E1", "c": "E1"}), "E1", "E2", "E3")
    (move,) = settle(stage, "a", "E1")
    assert isinstance(move, MoveContext)
    for name in "bc":
        assert settle(stage, name, "E3") == [], "E1 is busy: the strategy is not asked"
    with pytest.raises(GuardViolation, match="the move of c from E3 to E1 shares an engine with that of b"):
        stage.moved(move)
