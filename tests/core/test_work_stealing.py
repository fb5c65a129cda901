"""Steps that an engine with free slots takes from the queue of another one, as lists of events and commands."""

from __future__ import annotations

import pytest
from worlds.core_builders import Stage

from heddle_dask.core import events as ev
from heddle_dask.core.commands import TAKEN_BY, AbortStep, Command, StartStep
from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import GuardViolation
from heddle_dask.core.ids import EngineId
from heddle_dask.core.journal_codec import replay
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.strategies.presets import build_strategies

E1, E2, E3 = EngineId("E1"), EngineId("E2"), EngineId("E3")


def loaded(steps: int = 7, slots: int = 4) -> tuple[Stage, list[StartStep]]:
    """One engine with all its slots in use and the rest of the steps in its queue."""
    stage = Stage()
    stage.join("E1", slots=slots)
    names = [f"t{number}" for number in range(steps)]
    stage.submit(*names)
    starts = [stage.placed(name) for name in names]
    for start in starts[:slots]:
        stage.start(start)
    return stage, starts


def taken(commands: list[Command]) -> list[str]:
    """The trajectories whose steps are called back for another engine."""
    return [
        command.step_id.trajectory_id
        for command in commands
        if isinstance(command, AbortStep) and command.reason.startswith(TAKEN_BY)
    ]


def comes_back(stage: Stage, start: StartStep) -> StartStep:
    """The worker returns the step without tokens, and the driver asks for it again."""
    assert stage.finish(start, 0, "abort") == []
    name, index, attempt = start.step_id
    return stage.placed(name, index, attempt=attempt + 1)


def test_an_engine_that_joins_takes_what_waits_and_becomes_its_home() -> None:
    stage, starts = loaded()
    assert taken(stage.join("E2", slots=2)) == ["t6", "t5"], "the last in the queue, no more than it has slots"
    again = comes_back(stage, starts[6])
    assert again.engine_id == E2 and again.source_engine_id == E1
    assert stage.trajectory("t6").home == E2
    stage.start(again)
    stage.finish(again)
    assert stage.placed("t6", 1).engine_id == E2, "its later steps follow"


def test_a_slot_that_becomes_free_takes_the_next_one() -> None:
    stage, starts = loaded()
    stage.join("E2", slots=1)
    again = comes_back(stage, starts[6])
    stage.start(again)
    assert taken(stage.finish(again)) == ["t5"]


def test_a_step_is_taken_once() -> None:
    stage, starts = loaded()
    stage.join("E2", slots=1)
    again = comes_back(stage, starts[6])
    assert again.engine_id == E2
    stage.submit("other")
    stage.state.set_home(stage.trajectory("other"), E2)
    stage.placed("other")  # E2 is loaded as well now
    assert taken(stage.join("E3", slots=4)) == ["t5", "t4", "other"]


def test_a_step_that_has_ended_where_it_was_does_not_bind_the_next_one() -> None:
    stage, starts = loaded()
    stage.join("E2", slots=1)
    stage.start(starts[6])
    stage.finish(starts[6])
    assert stage.trajectory("t6").bound_for is None
    assert not stage.engine("E2").taking.keys() - {"t5"}


def test_without_the_engine_that_took_it_the_placement_decides() -> None:
    for loss in (lambda stage: stage.lose("E2"), lambda stage: stage.feed(ev.EngineDraining, E2)):
        stage, starts = loaded()
        stage.join("E2", slots=1)
        loss(stage)
        assert comes_back(stage, starts[6]).engine_id == E1
        assert not stage.engine("E2").taking


def test_the_end_of_a_trajectory_gives_the_slot_to_another() -> None:
    stage, _ = loaded()
    stage.join("E2", slots=1)
    assert taken(stage.end("t6")) == ["t5"]


def test_a_queue_that_bridges_the_way_of_the_next_step_stays() -> None:
    stage, _ = loaded(steps=4)
    assert taken(stage.join("E2")) == []


def test_a_context_that_the_engine_does_not_hold_stays() -> None:
    stage, _ = loaded()
    assert taken(stage.join("E2", max_context_tokens=100)) == []


def test_off_means_off() -> None:
    stage = Stage(overrides=["stealing=none"])
    stage.join("E1")
    stage.submit("a", "b", "c", "d", "e")
    for name in "abcde":
        stage.placed(name)
    assert taken(stage.join("E2")) == []


def test_a_new_step_leaves_a_loaded_home_for_an_empty_engine_without_waiting() -> None:
    stage = Stage()
    stage.join("E1", slots=64)
    names = [f"t{number}" for number in range(40)]
    stage.submit(*names)
    for name in names:
        stage.finish(stage.generating(name), 500)
    steps = [stage.placed(name, 1, context=600) for name in names[:-1]]
    assert {step.engine_id for step in steps} == {E1}
    stage.join("E2", slots=64)
    assert stage.placed(names[-1], 1, context=600).engine_id == E2


class Greedy:
    """A strategy that takes more than there is room for."""

    def take(self, view: object, idle: object, loaded: object, queue: list[object], most: int) -> list[object]:
        return [*queue, *queue]

    def prefers(self, *_: object) -> bool:
        return False


def test_a_strategy_that_takes_too_much_is_refused() -> None:
    strategies = build_strategies("sticky-least-loaded")
    strategies.stealing = Greedy()  # type: ignore[assignment]
    stage = Stage(strategies=strategies)
    stage.join("E1", slots=1)
    stage.submit("a", "b")
    stage.placed("a")
    stage.placed("b")
    with pytest.raises(GuardViolation, match="stealing took b, b: it may take 1 of b"):
        stage.join("E2", slots=1)


def test_a_replay_makes_the_same_choices() -> None:
    stage, starts = loaded()
    stage.join("E2", slots=2)
    comes_back(stage, starts[6])
    again = Controller(build_strategies("sticky-least-loaded"), RetryPolicy(max_pool_wait_s=0))
    assert list(replay(again, [[event, commands] for event, commands in stage.journal])) == []
