"""Engines and hosts that drain, as lists of events and commands."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from worlds.core_builders import Stage, action_of, engine_of, identity

from benchmarks.deadline import DEADLINE
from heddle_dask.core import events as ev
from heddle_dask.core.commands import (
    AbortStep,
    Command,
    DropContext,
    MoveContext,
    ReleaseEngine,
    ReleaseHost,
    RunAction,
    StartStep,
)
from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import GuardViolation
from heddle_dask.core.ids import ActionId, EngineId, HostId, TrajectoryId
from heddle_dask.core.journal_codec import replay
from heddle_dask.core.resources import Resources
from heddle_dask.core.transitions import EngineState, KvState, TrajectoryState
from heddle_dask.core.view import Grant
from heddle_dask.strategies.presets import build_strategies

E1, E2, E3 = EngineId("E1"), EngineId("E2"), EngineId("E3")
H1, H2 = HostId("H1"), HostId("H2")
A = TrajectoryId("a")


def joined(*engines: str, transfer: bool = False, kv_tokens: int = 0) -> Stage:
    """Engines and a host; no strategy moves a context."""
    stage = Stage()
    for name in engines:
        stage.feed(ev.EngineJoined, engine_of(name, 2, kv_tokens=kv_tokens, kv_transfer=transfer))
    stage.add_host("H1")
    return stage


def acting(stage: Stage, name: str) -> EngineId:
    """The trajectory has finished a step and waits for its tool; the engine that has its context."""
    stage.submit(name)
    start = stage.placed(name)
    stage.start(start)
    stage.finish(start)
    stage.feed(ev.ActionRequested, action_of(f"{name}-tool", name))
    return start.engine_id


def generating(stage: Stage, name: str) -> StartStep:
    """The trajectory has a step that has started."""
    stage.submit(name)
    start = stage.placed(name)
    stage.start(start)
    return start


def moves(commands: Sequence[Command]) -> list[MoveContext]:
    return [command for command in commands if isinstance(command, MoveContext)]


def other_than(engine_id: EngineId) -> EngineId:
    return E2 if engine_id == E1 else E1


# -- residents at rest -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("transfer", "kind"), [(True, "transfer"), (False, "recompute")])
def test_a_resident_at_rest_moves_with_its_kv_cache_where_both_can(transfer: bool, kind: str) -> None:
    stage = joined("E1", "E2", transfer=transfer)
    home = acting(stage, "a")
    (move,) = stage.feed(ev.EngineDraining, home)
    assert move == MoveContext(A, home, other_than(home), kind)
    assert stage.moved(move) == [ReleaseEngine(home)]
    assert stage.engine(home).state is EngineState.DRAINED
    stage.feed(ev.ActionFinished, ActionId("a-tool"), H1, 0.1)
    assert stage.placed("a", 1).engine_id == other_than(home)


def test_residents_leave_one_after_the_other_to_the_engine_with_the_least_load() -> None:
    stage = joined("E1")
    for name in ("a", "b", "c"):
        acting(stage, name)
    stage.feed(ev.EngineJoined, engine_of("E2"))
    stage.feed(ev.EngineJoined, engine_of("E3"))
    commands, targets = stage.feed(ev.EngineDraining, E1), []
    while move := next(iter(moves(commands)), None):
        targets.append(move.target_engine_id)
        commands = stage.moved(move)
    assert sorted(targets) == [E2, E2, E3]
    assert commands[-1] == ReleaseEngine(E1)


def test_a_move_that_fails_leaves_the_kv_cache_behind_and_the_engine_free() -> None:
    stage = joined("E1", "E2", transfer=True)
    home = acting(stage, "a")
    (move,) = moves(stage.feed(ev.EngineDraining, home))
    assert stage.moved(move, ok=False) == [DropContext(A, home), ReleaseEngine(home)]
    record = stage.trajectory("a")
    assert (record.home, record.kv) == (None, KvState.ABSENT)
    stage.feed(ev.ActionFinished, ActionId("a-tool"), H1, 0.1)
    again = stage.placed("a", 1)
    assert (again.engine_id, again.source_engine_id) == (other_than(home), None)


def test_a_step_that_comes_before_its_context_has_moved_runs_elsewhere() -> None:
    stage = joined("E1")
    acting(stage, "a")
    acting(stage, "b")
    stage.feed(ev.EngineJoined, engine_of("E2"))
    (move,) = moves(stage.feed(ev.EngineDraining, E1))
    waiting = "b" if move.trajectory_id == "a" else "a"
    stage.feed(ev.ActionFinished, ActionId(f"{waiting}-tool"), H1, 0.1)
    start = stage.placed(waiting, 1)
    assert (start.engine_id, start.source_engine_id) == (E2, E1)
    assert stage.moved(move) == []
    assert stage.start(start) == [ReleaseEngine(E1)]


@pytest.mark.parametrize("how", ["ended", "cancelled", "expired"])
def test_a_queued_step_that_no_longer_needs_its_context_holds_no_engine(how: str) -> None:
    stage = joined("E1", "E2")
    start = generating(stage, "a")
    stage.feed(ev.EngineDraining, start.engine_id)
    stage.finish(start)
    again = stage.placed("a", 1)
    if how == "ended":
        assert stage.end("a")[-1] == ReleaseEngine(start.engine_id)
    elif how == "cancelled":
        assert stage.feed(ev.StepCancelled, again.step_id)[-1] == ReleaseEngine(start.engine_id)
    else:
        assert stage.feed(ev.EngineExpiring, start.engine_id) == [ReleaseEngine(start.engine_id)]


def test_a_trajectory_that_rests_later_leaves_when_its_tool_is_called() -> None:
    stage = joined("E1", "E2")
    start = generating(stage, "a")
    assert stage.feed(ev.EngineDraining, start.engine_id) == [], "its step goes on"
    assert stage.finish(start) == []
    (run, move) = stage.feed(ev.ActionRequested, action_of("x", "a"))
    assert isinstance(run, RunAction)
    assert move == MoveContext(A, start.engine_id, other_than(start.engine_id), "recompute")


# -- steps -----------------------------------------------------------------------------------------------


def test_a_queued_step_is_stopped_and_asked_for_elsewhere() -> None:
    stage = joined("E1", "E2")
    stage.submit("a")
    start = stage.placed("a")
    (stop,) = stage.feed(ev.EngineDraining, start.engine_id)
    assert stop == AbortStep(start.step_id, start.engine_id, "its engine drains")
    facts = (*identity(start), 0, 0, "abort")
    assert stage.feed(ev.StepFinished, *facts) == []
    again = stage.placed("a", attempt=1)
    assert again.engine_id == other_than(start.engine_id)
    assert stage.start(again) == [ReleaseEngine(start.engine_id)]
    assert stage.trajectory("a").preemptions == 0


def test_a_running_step_goes_on_and_the_next_one_runs_elsewhere() -> None:
    stage = joined("E1", "E2")
    start = generating(stage, "a")
    assert stage.feed(ev.EngineDraining, start.engine_id, 100.0) == []
    assert stage.engine(start.engine_id).ends_at == 100.0
    stage.finish(start)
    again = stage.placed("a", 1)
    assert (again.engine_id, again.source_engine_id) == (other_than(start.engine_id), start.engine_id)
    assert stage.start(again) == [ReleaseEngine(start.engine_id)], "it has fetched its context"


def test_a_step_that_cannot_finish_in_time_is_stopped_and_goes_on_elsewhere() -> None:
    stage = joined("E1", "E2")
    start = generating(stage, "a")
    home = start.engine_id
    stage.feed(ev.EngineDraining, home)
    assert stage.feed(ev.EngineExpiring, home) == [AbortStep(start.step_id, home, "its engine is about to end")]
    commands = stage.feed(ev.StepFinished, *identity(start), 40, 0, "abort")
    assert commands == [ReleaseEngine(home)]
    assert stage.trajectory("a").generated_tokens == 40
    (again,) = stage.request("a", attempt=1, context=140)
    assert isinstance(again, StartStep)
    assert again.engine_id == other_than(home)
    stage.late(ev.EngineExpiring, home)


def test_a_kv_cache_that_has_not_moved_in_time_is_left_behind() -> None:
    stage = joined("E1")
    acting(stage, "a")
    assert stage.feed(ev.EngineDraining, E1) == []
    assert stage.feed(ev.EngineExpiring, E1) == [DropContext(A, E1), ReleaseEngine(E1)]
    assert stage.trajectory("a").home is None


def test_only_a_draining_engine_expires() -> None:
    stage = joined("E1")
    stage.late(ev.EngineExpiring, E1)
    stage.late(ev.EngineExpiring, E2)


# -- no other engine -------------------------------------------------------------------------------------


def test_without_another_engine_all_stays_until_one_joins() -> None:
    stage = joined("E1")
    acting(stage, "a")
    stage.submit("b")
    queued = stage.placed("b")
    stage.submit("c")
    assert stage.feed(ev.EngineDraining, E1) == []
    assert stage.request("c") == []
    commands = stage.feed(ev.EngineJoined, engine_of("E2"))
    kinds = [type(command) for command in commands]
    assert kinds == [StartStep, AbortStep, MoveContext]
    assert commands[1] == AbortStep(queued.step_id, E1, "its engine drains")
    assert commands[2] == MoveContext(A, E1, E2, "recompute")


def test_residents_of_an_engine_that_ends_before_another_joins_are_lost_as_ever() -> None:
    stage = joined("E1")
    acting(stage, "a")
    stage.feed(ev.EngineDraining, E1)
    stage.lose("E1")
    assert stage.trajectory("a").kv is KvState.LOST
    assert stage.trajectory("a").state is TrajectoryState.ACTING


def test_a_context_too_long_for_the_others_stays() -> None:
    stage = joined("E1")
    acting(stage, "a")
    stage.join("E2", max_context_tokens=64)
    assert stage.feed(ev.EngineDraining, E1) == []


# -- the end of a drain ----------------------------------------------------------------------------------


def test_an_engine_without_residents_is_released_at_once_and_once() -> None:
    stage = joined("E1", "E2")
    assert stage.feed(ev.EngineDraining, E1) == [ReleaseEngine(E1)]
    stage.late(ev.EngineDraining, E1)
    assert stage.lose("E1") == []
    stage.late(ev.EngineDraining, E1)


def test_an_order_to_drain_comes_once_and_not_after_the_loss() -> None:
    stage = joined("E1", "E2")
    generating(stage, "a")
    for name in (E1, E2):
        stage.feed(ev.EngineDraining, name)
        stage.late(ev.EngineDraining, name)
    stage.late(ev.EngineDraining, E3)


def test_a_reservation_on_a_draining_engine_is_released() -> None:
    stage = Stage(strategies=build_strategies("heddle", overrides=[f"admission={DEADLINE}"]))
    stage.feed(ev.EngineJoined, engine_of("E1", kv_tokens=10_000))
    stage.submit("a", prompt_tokens=100)
    stage.predict("a", 50)
    assert stage.trajectory("a").reserved_on == E1
    assert ReleaseEngine(E1) in stage.feed(ev.EngineDraining, E1)
    assert stage.trajectory("a").reserved_on is None


# -- hosts -----------------------------------------------------------------------------------------------


def test_a_draining_host_finishes_its_actions_and_takes_no_other() -> None:
    stage = joined("E1")
    acting(stage, "a")
    assert stage.feed(ev.HostDraining, H1) == []
    stage.late(ev.HostDraining, H1)
    stage.submit("b")
    assert stage.feed(ev.ActionRequested, action_of("y", "b")) == []
    assert stage.feed(ev.ActionFinished, ActionId("a-tool"), H1, 0.1) == [ReleaseHost(H1)]
    assert stage.add_host("H2") == [RunAction(ActionId("y"), H2, Resources.of(cpus=1))]
    stage.feed(ev.HostLost, H1)
    stage.late(ev.HostDraining, H1)


def test_an_action_that_outlives_its_host_runs_again_on_another() -> None:
    stage = joined("E1")
    acting(stage, "a")
    stage.add_host("H2")
    stage.feed(ev.HostDraining, H1)
    (again,) = stage.feed(ev.HostLost, H1)
    assert again == RunAction(ActionId("a-tool"), H2, Resources.of(cpus=1))


def test_an_action_for_a_draining_host_is_refused() -> None:
    stage = joined("E1")
    stage.submit("a")
    stage.feed(ev.HostDraining, H1)
    stage.feed(ev.ActionRequested, action_of("x", "a"))

    class Stubborn:
        def allocate(self, view: object) -> list[Grant]:
            return [Grant(ActionId("x"), H1, 1)]

    stage.controller.actions.allocation = Stubborn()
    with pytest.raises(GuardViolation, match="H1 drains"):
        stage.controller.actions.allocate()


# -- the journal -----------------------------------------------------------------------------------------


def test_a_drain_replays_to_the_same_commands() -> None:
    stage = joined("E1", "E2")
    home = acting(stage, "a")
    (move,) = moves(stage.feed(ev.EngineDraining, home, 30.0))
    stage.moved(move)
    stage.feed(ev.HostDraining, H1)
    fresh = Controller(build_strategies("sticky-least-loaded"))
    assert list(replay(fresh, stage.journal)) == []
