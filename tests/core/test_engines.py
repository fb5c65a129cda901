"""Engines that are lost, as lists of events and commands."""

from __future__ import annotations

from typing import get_args

import pytest
from worlds.core_builders import Stage, engine_of, host_of, identity

from heddle_dask.core import events as ev
from heddle_dask.core.commands import (
    GiveUpStep,
    StartStep,
)
from heddle_dask.core.ids import EngineId, HostId, StepId, TrajectoryId
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.core.transitions import KvState, TrajectoryState

A = TrajectoryId("a")
E1, E2 = EngineId("E1"), EngineId("E2")


def two_engines(**options: object) -> Stage:
    stage = Stage(**options)  # type: ignore[arg-type]
    stage.join("E1", "E2")
    return stage


# -- engines lost ----------------------------------------------------------------------------------------


def test_a_stranded_step_is_commanded_again_elsewhere_with_the_same_attempt() -> None:
    stage = two_engines()
    stage.submit("a")
    start = stage.placed("a")
    stage.start(start)
    other = E2 if start.engine_id == E1 else E1
    (again,) = stage.lose(start.engine_id)
    assert isinstance(again, StartStep)
    assert identity(again) == (StepId(A, 0, 0), other)
    assert again.source_engine_id is None, "its context died with the worker"
    assert again.order > start.order
    stage.late(ev.StepFinished, *identity(start), 10, 0, "stop")
    stage.start(again)
    stage.finish(again)


def test_stranded_steps_wait_before_those_that_came_later() -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("a", "b")
    stage.placed("a")
    stage.feed(ev.EngineDraining, E1)
    assert stage.request("b") == []
    assert stage.lose("E1") == []
    assert [c.step_id.trajectory_id for c in stage.join("E2") if isinstance(c, StartStep)] == ["a", "b"]


def test_steps_of_an_engine_that_died_under_a_living_worker_report_by_themselves() -> None:
    stage = two_engines()
    stage.submit("a", "b")
    stage.finish(stage.placed("a"))
    start = stage.placed("a", 1)
    stage.start(start)
    assert stage.lose(start.engine_id, stranded=False) == []
    record = stage.trajectory("a")
    assert record.state is TrajectoryState.GENERATING
    assert record.kv is KvState.LOST
    assert stage.fail(start) == []
    assert record.home is None, "its engine is gone"
    assert not stage.engine(start.engine_id).residents
    again = stage.placed("a", 1, attempt=1)
    assert again.engine_id != start.engine_id


def test_an_answer_that_a_lost_engine_still_gave_counts_and_leaves_no_kv() -> None:
    stage = two_engines()
    stage.submit("a")
    stage.finish(stage.placed("a"), new_tokens=1)
    start = stage.placed("a", 1)
    stage.lose(start.engine_id, stranded=False)
    stage.finish(start, new_tokens=9)
    record = stage.trajectory("a")
    assert (record.generated_tokens, record.steps_finished) == (10, 2)
    assert (record.kv, record.home) == (KvState.LOST, None)


def test_a_worker_that_dies_after_its_engine_strands_what_had_not_reported() -> None:
    stage = two_engines()
    stage.submit("a")
    start = stage.placed("a")
    stage.lose(start.engine_id, stranded=False)
    (again,) = stage.lose(start.engine_id, stranded=True)
    assert isinstance(again, StartStep)
    assert again.engine_id != start.engine_id


@pytest.mark.parametrize("preset", ["heddle", "heddle-paper"])
def test_an_engine_that_joins_gets_its_share_of_what_was_planned_and_has_not_begun(preset: str) -> None:
    stage = Stage(preset, overrides=["admission=unlimited"])
    stage.join("E1", "E2", slots=8)
    names = [f"t{number}" for number in range(24)]
    for name in names:
        stage.submit(name, prompt_tokens=100)
        stage.predict(name, 1000)
    begun = [stage.placed(name).engine_id for name in names[:3]]
    assert "E3" not in begun
    stage.join("E3", slots=8)
    homes = [*begun, *(stage.placed(name).engine_id for name in names[3:])]
    assert [homes.count(EngineId(name)) for name in ("E1", "E2", "E3")] == [8, 8, 8]


def test_an_engine_is_lost_once_and_an_unknown_one_never() -> None:
    stage = Stage()
    stage.join("E1")
    stage.lose("E1")
    stage.late(ev.EngineLost, E1, "test", True)
    stage.late(ev.EngineLost, E1, "test", False)
    stage.late(ev.EngineLost, EngineId("E9"), "test", True)


def test_an_engine_that_comes_back_needs_a_new_id() -> None:
    stage = Stage()
    stage.join("E1")
    stage.lose("E1")
    with pytest.raises(KeyError, match="needs a new id"):
        stage.feed(ev.EngineJoined, engine_of("E1"))


def test_a_trajectory_between_steps_loses_its_home_with_the_engine() -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("a")
    stage.finish(stage.placed("a"))
    stage.lose("E1")
    record = stage.trajectory("a")
    assert (record.home, record.kv) == (None, KvState.LOST)
    stage.join("E2")
    assert stage.placed("a", 1).source_engine_id is None


def test_a_step_that_kills_its_engines_is_given_up_after_max_losses() -> None:
    stage = Stage(retries=RetryPolicy(max_losses=2))
    stage.submit("a", "b")
    stage.request("a")
    for number in range(3):
        (start,) = stage.join(f"E{number}")
        assert isinstance(start, StartStep)
        stage.start(start)
        commands = stage.lose(f"E{number}")
    assert commands == [GiveUpStep(StepId(A, 0, 0), "its engine died 3 times while it was generating")]
    assert stage.join("E9") == []
    stage.end("a")


def test_a_queued_step_is_innocent_of_its_engines_death() -> None:
    stage = Stage(retries=RetryPolicy(max_losses=1))
    stage.submit("a")
    stage.request("a")
    for number in range(6):
        (start,) = stage.join(f"E{number}")
        assert isinstance(start, StartStep)
        assert stage.lose(f"E{number}") == []


def test_losses_count_per_step_and_survive_a_new_attempt() -> None:
    stage = Stage(retries=RetryPolicy(max_losses=1))
    stage.submit("a")
    stage.request("a")
    (start,) = stage.join("E1")
    assert isinstance(start, StartStep)
    stage.start(start)
    stage.lose("E1")
    (start,) = stage.join("E2")
    assert isinstance(start, StartStep)
    stage.fail(start)
    again = stage.placed("a", attempt=1)
    assert stage.trajectory("a").losses == 1
    stage.finish(again)
    stage.placed("a", 1)
    assert stage.trajectory("a").losses == 0


# -- events and joins -----------------------------------------------------------------------------------


def test_every_event_has_a_handler() -> None:
    stage = Stage()
    for kind in get_args(ev.Event):
        assert kind in stage.controller._handlers


def test_a_host_joins_once() -> None:
    stage = Stage()
    stage.add_host("H1")
    with pytest.raises(KeyError, match="needs a new id"):
        stage.feed(ev.HostJoined, host_of("H1"))
    stage.feed(ev.HostLost, HostId("H1"))
    stage.late(ev.HostLost, HostId("H1"))


@pytest.mark.parametrize("lost_first", [True, False])
def test_a_step_that_kills_the_engine_under_a_living_worker_is_given_up_too(lost_first: bool) -> None:
    """Its worker reports the step and the loss, in either order; the driver asks again each time."""
    stage = Stage(retries=RetryPolicy(max_losses=2))
    stage.join(*(f"E{number}" for number in range(9)))
    stage.submit("a", "b")
    commands: list[object] = []
    for attempt in range(4):
        commands = [*stage.request("a", attempt=attempt)]
        (start,) = commands
        if not isinstance(start, StartStep):
            break
        stage.start(start)
        if lost_first:
            stage.lose(start.engine_id, stranded=False)
        stage.feed(ev.StepFailed, *identity(start), ev.ENGINE_LOST)
        if not lost_first:
            stage.lose(start.engine_id, stranded=False)
    assert commands == [GiveUpStep(StepId(A, 0, 3), "its engine died 3 times while it was generating")]
    assert len(stage.state.ready_engines) == 6


def test_a_step_that_was_refused_or_had_not_begun_has_killed_no_engine() -> None:
    stage = Stage(retries=RetryPolicy(max_losses=0))
    stage.join("E1", "E2", "E3")
    stage.submit("a")
    stage.fail(stage.generating("a"))
    queued = stage.placed("a", attempt=1)
    stage.feed(ev.StepFailed, *identity(queued), ev.ENGINE_LOST)
    assert isinstance(stage.placed("a", attempt=2), StartStep)
