"""Lists of events in, lists of commands out: trajectories, steps and admission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from worlds.core_builders import Stage, identity, step_of

from heddle_dask.core import events as ev
from heddle_dask.core.commands import (
    AbortStep,
    AdmitTrajectory,
    GiveUpStep,
    StartStep,
)
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.errors import InvalidTransition
from heddle_dask.core.ids import EngineId, StepId, TrajectoryId
from heddle_dask.core.nouns import Priority, StepRequest
from heddle_dask.core.transitions import KvEvent, KvState, TrajectoryState
from heddle_dask.strategies.presets import build_strategies

A = TrajectoryId("a")
E1, E2 = EngineId("E1"), EngineId("E2")


def two_engines(**options: object) -> Stage:
    stage = Stage(**options)  # type: ignore[arg-type]
    stage.join("E1", "E2")
    return stage


# -- trajectories ----------------------------------------------------------------------------------------


def test_a_submitted_trajectory_is_admitted_at_once_by_default() -> None:
    stage = Stage()
    assert stage.submit("a") == [AdmitTrajectory(A)]
    assert stage.state.alive == 1
    assert stage.trajectory("a").state is TrajectoryState.THINKING


def test_a_trajectory_is_submitted_once() -> None:
    stage = Stage()
    stage.submit("a")
    with pytest.raises(KeyError, match="a was submitted before"):
        stage.submit("a")


def test_one_trajectory_from_submission_to_its_end() -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("a")
    start = stage.placed("a", context=100)
    assert start == StartStep(StepId(A, 0, 0), E1, Priority(-start.order), start.order)
    engine = stage.engine("E1")
    assert (engine.inflight_tokens, engine.resident_tokens, engine.generating) == (100, 100, 0)
    assert stage.start(start) == []
    assert engine.generating == 1
    assert stage.finish(start, new_tokens=25) == []
    record = stage.trajectory("a")
    assert (record.context_tokens, record.generated_tokens, record.steps_finished) == (125, 25, 1)
    assert (engine.inflight_tokens, engine.resident_tokens, engine.generating) == (0, 125, 0)
    again = stage.placed("a", 1, context=140)
    assert again.source_engine_id == E1
    assert stage.finish(again) == []
    assert stage.end("a") == []
    assert stage.state.alive == 0
    assert not stage.state.trajectories
    assert (engine.resident_tokens, engine.placed) == (0, 2)


@pytest.mark.parametrize("started", [False, True])
def test_the_end_of_a_trajectory_aborts_its_open_step(started: bool) -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("a")
    start = stage.placed("a")
    if started:
        stage.start(start)
    assert stage.end("a") == [AbortStep(*identity(start), reason="trajectory ended")]
    assert (stage.engine("E1").inflight_tokens, stage.engine("E1").generating) == (0, 0)
    stage.late(ev.StepStarted, *identity(start))
    stage.late(ev.StepFinished, *identity(start), 3, 0, "abort")


def test_the_end_of_a_trajectory_takes_its_waiting_step_back() -> None:
    stage = Stage()
    stage.submit("a")
    assert stage.request("a") == []
    assert stage.end("a") == []
    assert stage.join("E1") == []


def test_a_trajectory_ends_once_and_an_unknown_one_never() -> None:
    stage = Stage()
    stage.submit("a")
    stage.end("a")
    stage.late(ev.TrajectoryEnded, A, "completed")
    stage.late(ev.TrajectoryEnded, TrajectoryId("z"), "completed")
    stage.late(ev.StepRequested, step_of("a"))
    stage.late(ev.StepRequested, step_of("z"))


def test_nothing_of_an_ended_trajectory_is_kept() -> None:
    stage = Stage()
    stage.join("E1")
    for number in range(20):
        stage.submit(f"t{number}")
        stage.finish(stage.placed(f"t{number}"))
        stage.end(f"t{number}")
    assert not stage.state.trajectories
    assert not stage.engine("E1").residents


# -- admission -------------------------------------------------------------------------------------------


def test_at_most_admits_the_oldest_as_others_end() -> None:
    stage = Stage(overrides=["admission=at-most,alive=2"])
    assert stage.submit("a", "b", "c", "d") == [AdmitTrajectory(A), AdmitTrajectory(TrajectoryId("b"))]
    assert stage.end("b") == [AdmitTrajectory(TrajectoryId("c"))]
    assert stage.state.alive == 2


def test_a_trajectory_that_ends_before_its_admission_frees_no_place() -> None:
    stage = Stage(overrides=["admission=at-most,alive=1"])
    stage.submit("a", "b", "c")
    assert stage.end("b") == []
    assert stage.state.alive == 1
    assert stage.end("a") == [AdmitTrajectory(TrajectoryId("c"))]


def test_a_step_of_a_trajectory_that_is_not_admitted_is_our_bug() -> None:
    stage = Stage(overrides=["admission=at-most,alive=1"])
    stage.submit("a", "b")
    with pytest.raises(InvalidTransition, match="'step requested' cannot happen in state 'submitted'"):
        stage.request("b")


# -- steps -----------------------------------------------------------------------------------------------


def test_a_second_request_while_a_step_is_open_is_our_bug_and_tells_the_story() -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("a")
    stage.placed("a")
    with pytest.raises(InvalidTransition, match=r"admitted: submitted -> thinking.*placed: waiting -> queued"):
        stage.request("a", 1)


def test_steps_wait_for_the_first_engine_in_order_of_request() -> None:
    stage = Stage()
    stage.submit("a", "b", "c")
    assert stage.request("b") == stage.request("a") == stage.request("c") == []
    commands = stage.join("E1")
    assert [c.step_id.trajectory_id for c in commands if isinstance(c, StartStep)] == ["b", "a", "c"]
    orders = [c.order for c in commands if isinstance(c, StartStep)]
    assert orders == sorted(set(orders)), "distinct, and the first runs first"


def test_a_step_may_finish_before_its_start_was_told() -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("a")
    start = stage.placed("a")
    stage.finish(start)
    assert stage.engine("E1").generating == 0
    stage.late(ev.StepStarted, *identity(start))


def test_a_message_told_twice_counts_once() -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("a")
    start = stage.placed("a")
    stage.start(start)
    stage.late(ev.StepStarted, *identity(start))
    stage.finish(start)
    stage.late(ev.StepFinished, *identity(start), 10, 0, "stop")
    stage.late(ev.StepFailed, *identity(start), "engine")


def test_a_step_that_failed_is_the_drivers_to_ask_again() -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("a")
    first = stage.placed("a")
    stage.start(first)
    assert stage.fail(first) == []
    assert stage.trajectory("a").state is TrajectoryState.THINKING
    second = stage.placed("a", attempt=1)
    assert second.step_id[1:] == (0, 1)
    stage.late(ev.StepStarted, *identity(first))
    stage.late(ev.StepFinished, *identity(first), 10, 0, "stop")
    stage.late(ev.StepFailed, *identity(first), "engine")
    stage.finish(second)


def test_messages_of_another_engine_are_late() -> None:
    stage = two_engines(overrides=["placement=round-robin"])
    stage.submit("a")
    start = stage.placed("a")
    other = replace(start, engine_id=E2 if start.engine_id == E1 else E1)
    stage.late(ev.StepStarted, *identity(other))
    stage.late(ev.StepFinished, *identity(other), 10, 0, "stop")
    stage.late(ev.StepFailed, *identity(other), "engine")
    stage.late(
        ev.StepFinished,
        *identity(replace(start, step_id=start.step_id._replace(step_index=1))),
        10,
        0,
        "stop",
    )
    stage.late(ev.StepStarted, StepId(TrajectoryId("z"), 0, 0), E1)


def test_an_aborted_step_keeps_its_tokens_and_is_no_finished_step() -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("a")
    stage.finish(stage.placed("a", context=100), new_tokens=7, reason="abort")
    record = stage.trajectory("a")
    assert (record.context_tokens, record.generated_tokens, record.steps_finished) == (107, 7, 0)
    assert record.kv is KvState.RESIDENT


def test_the_context_of_a_waiting_step_is_counted_once_it_is_placed() -> None:
    stage = Stage()
    stage.submit("a")
    stage.request("a", context=321)
    stage.join("E1")
    assert stage.engine("E1").inflight_tokens == 321


def test_a_context_that_fits_no_engine_is_given_up_once() -> None:
    stage = Stage()
    stage.join("E1", max_context_tokens=128)
    stage.join("E2", max_context_tokens=256)
    stage.submit("a")
    assert stage.request("a", context=256) == [
        GiveUpStep(StepId(A, 0, 0), "context of 256 tokens, engines take 256"),
    ]
    assert stage.join("E3", max_context_tokens=1024) == []
    assert stage.end("a") == []


def test_a_long_context_waits_for_an_engine_and_is_then_given_up() -> None:
    stage = Stage()
    stage.submit("a")
    assert stage.request("a", context=5000) == []
    (command,) = stage.join("E1", max_context_tokens=4096)
    assert isinstance(command, GiveUpStep)


def test_a_long_context_leaves_its_home_for_an_engine_that_takes_it() -> None:
    stage = Stage()
    stage.join("E1", max_context_tokens=128)
    stage.submit("a")
    stage.finish(stage.placed("a"))
    stage.join("E2", max_context_tokens=1024)
    moved = stage.placed("a", 1, context=500)
    assert (moved.engine_id, moved.source_engine_id) == ("E2", "E1")
    assert stage.trajectory("a").home == E2


@dataclass
class OneAtATime:
    """Waits while every candidate has a step."""

    def choose_engine(self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Engine | None:
        return next((engine for engine in candidates if not engine.inflight), None)


@pytest.mark.parametrize("how", ["finish", "fail", "end"])
def test_a_placement_that_waits_is_asked_again_when_a_step_ends(how: str) -> None:
    stage = Stage(strategies=replace(build_strategies("sticky"), placement=OneAtATime()))
    stage.join("E1")
    stage.submit("a", "b", "c")
    first = stage.placed("a")
    assert stage.request("b") == stage.request("c") == []
    commands = {"finish": stage.finish, "fail": stage.fail}[how](first) if how != "end" else stage.end("a")
    started = [c.step_id.trajectory_id for c in commands if isinstance(c, StartStep)]
    assert started == ["b"]
    assert stage.end("b")[-1].step_id.trajectory_id == "c"  # type: ignore[union-attr]


# -- steps that their programs give up -------------------------------------------------------------------


def cancel(stage: Stage, name: str, index: int, attempt: int = 0) -> list[object]:
    return [*stage.feed(ev.StepCancelled, StepId(TrajectoryId(name), index, attempt))]


def test_a_running_step_that_is_cancelled_is_aborted_and_its_slot_is_for_others() -> None:
    stage = Stage()
    stage.join("E1", slots=1)
    stage.submit("a", "b")
    start = stage.generating("a")
    assert cancel(stage, "a", 0) == [AbortStep(StepId(A, 0, 0), E1, "cancelled by its program")]
    record = stage.trajectory("a")
    assert (record.state, record.counted_on) == (TrajectoryState.THINKING, None)
    assert stage.engine("E1").inflight_tokens == 0
    stage.late(ev.StepFinished, *identity(start), 3, 0, "abort")
    stage.late(ev.StepCancelled, StepId(A, 0, 0))
    again = stage.placed("a", attempt=1, context=120)
    stage.late(ev.StepCancelled, StepId(A, 0, 0))
    stage.finish(again)
    assert record.steps_finished == 1


def test_a_step_that_waits_for_an_engine_can_be_cancelled() -> None:
    stage = Stage()
    stage.submit("a")
    assert stage.request("a") == []
    assert cancel(stage, "a", 0) == []
    assert stage.join("E1") == []
    assert stage.trajectory("a").state is TrajectoryState.THINKING
    stage.end("a")


def test_a_step_whose_context_moves_can_be_cancelled() -> None:
    """The move ends as it would have, and the next step goes to its target."""
    stage = two_engines()
    stage.submit("a")
    stage.finish(stage.generating("a"))
    record = stage.trajectory("a")
    record.advance_kv(KvEvent.MOVE_STARTED)
    assert stage.request("a", 1) == []
    assert cancel(stage, "a", 1) == []
    assert (record.state, record.kv) == (TrajectoryState.THINKING, KvState.MOVING)
    record.advance_kv(KvEvent.MOVE_ENDED)
    assert isinstance(stage.placed("a", 1, attempt=1), StartStep)
