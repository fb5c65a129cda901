"""Preemption as lists of events and commands: who is stopped, how often, and what becomes of what it had."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from worlds.core_builders import Stage, identity, trajectory_spec

from heddle_dask.core import events as ev
from heddle_dask.core.commands import AbortStep, Command, PredictRemaining, StartStep
from heddle_dask.core.entities import Trajectory
from heddle_dask.core.errors import GuardViolation
from heddle_dask.core.ids import EngineId
from heddle_dask.core.nouns import Priority
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.core.transitions import TrajectoryState
from heddle_dask.strategies.preemption import Hysteresis
from heddle_dask.strategies.presets import build_strategies

LONGEST_FIRST = (
    "scheduling=longest-first",
    "predictor=oracle",
    "preemption=hysteresis,ratio=1.5,margin_tokens=256,least_wait_tokens=0",
)


def crowded(slots: int = 1, *, retries: RetryPolicy | None = None, **predicted: float) -> Stage:
    """One engine, and trajectories of those predicted lengths."""
    stage = Stage(overrides=LONGEST_FIRST, retries=retries)
    stage.join("E1", slots=slots)
    for name, tokens in predicted.items():
        stage.submit(name)
        stage.predict(name, tokens)
    return stage


def stopped(commands: list[Command]) -> list[str]:
    """The victim of a preemption; its command follows the start of the preempting step."""
    start, *orders = commands
    assert isinstance(start, StartStep)
    assert all(isinstance(order, AbortStep) for order in orders)
    return [order.step_id.trajectory_id for order in orders if isinstance(order, AbortStep)]


# -- who is stopped --------------------------------------------------------------------------------------


def test_a_step_that_is_clearly_longer_stops_the_running_one() -> None:
    stage = crowded(a=1000, b=2000)
    running = stage.generating("a")
    start, order = stage.request("b")
    assert isinstance(start, StartStep)
    assert order == AbortStep(*identity(running), reason="preempted for b")
    assert (start.priority.tokens, running.priority.tokens) == (2000, 1000)
    assert (stage.trajectory("a").stopping, stage.trajectory("a").preemptions) == (True, 1)
    assert stage.trajectory("a").state is TrajectoryState.GENERATING, "until it reports"


@pytest.mark.parametrize(
    ("steps", "stops"),
    [
        # Each ends at its mean's rate: two of 30 tokens leave a slot within 15, of 32 within 16.
        ([(1, 30), (1, 30)], False),
        ([(1, 32), (1, 32)], True),
        ([(4, 60), (1, 400)], False),
        ([(2, 40), (0, 0)], True),  # the length of a first step is unknown
        ([(2, 30), (0, 0)], False),
        ([(0, 0)], True),
    ],
)
def test_nobody_is_stopped_where_a_slot_is_about_to_be_free(steps: list[tuple[int, int]], stops: bool) -> None:
    rule = Hysteresis(least_wait_tokens=16.0)
    running = [Trajectory(trajectory_spec(f"r{number}"), number) for number in range(len(steps))]
    for record, (finished, tokens) in zip(running, steps, strict=True):
        record.steps_finished, record.generated_tokens = finished, tokens
        record.priority = Priority(0, 10.0)
    waiting = Trajectory(trajectory_spec("w"), 9)
    waiting.priority = Priority(0, 5000.0)
    assert (rule.victim(waiting, running) is not None) == stops
    running[0].generated_tokens += 500
    running[0].open_step_tokens += 500
    assert (rule.victim(waiting, running) is not None) == stops, "what an open step has made says nothing"


@pytest.mark.parametrize(
    ("running", "waiting", "stops"),
    [
        (1000, 1500, False),  # not above the ratio
        (1000, 1501, True),
        (100, 356, False),  # above the ratio, not above the margin
        (100, 357, True),
        (0, 256, False),
        (0, 257, True),
        (2000, 1000, False),
    ],
)
def test_the_hysteresis_needs_both_ratio_and_margin(running: float, waiting: float, stops: bool) -> None:
    stage = crowded(a=running, b=waiting)
    stage.generating("a")
    assert stopped(stage.request("b")) == (["a"] if stops else [])


def test_without_a_margin_anything_longer_stops_and_an_equal_does_not() -> None:
    def record(name: str, number: int, priority: float) -> Trajectory:
        made = Trajectory(trajectory_spec(name), number)
        made.priority = Priority(0, priority)
        return made

    rule = Hysteresis(ratio=1.0, margin_tokens=0.0)
    old, new, equal = record("a", 1, 10.0), record("b", 2, 10.5), record("c", 3, 10.0)
    assert rule.victim(new, [old, equal]) is equal, "of equals the latest"
    assert rule.victim(equal, [old]) is None


@pytest.mark.parametrize(
    ("running", "waiting", "classes", "stops"),
    [
        (Priority(-3), Priority(-2), 1, True),  # least attained: levels
        (Priority(-3), Priority(-3), 1, False),
        (Priority(-3), Priority(-2), 2, False),
        (Priority(-2, 5000.0), Priority(-1, 1.0), 1, True),  # group first: lacking members before tokens
        (Priority(-1, 500.0), Priority(-1, 900.0), 1, False),  # within a level tokens only order
        (Priority(-1, 1.0), Priority(-2, 5000.0), 1, False),
        (Priority(-7), Priority(-9), 1, False),  # first come: a waiting step came later
    ],
)
def test_levels_come_before_tokens(running: Priority, waiting: Priority, classes: int, stops: bool) -> None:
    runs, waits = Trajectory(trajectory_spec("a"), 1), Trajectory(trajectory_spec("b"), 2)
    runs.priority, waits.priority = running, waiting
    victim = Hysteresis(margin_levels=classes).victim(waits, [runs])
    assert victim is (runs if stops else None)


def test_a_step_of_a_group_that_lacks_fewer_stops_one_of_a_group_that_lacks_more() -> None:
    stage = Stage(overrides=["scheduling=group-first", "preemption=hysteresis"])
    stage.join("E1", slots=1)
    stage.submit("a", "b", "c", group="many")
    stage.submit("d", group="one")
    stage.generating("a")
    assert stopped(stage.request("b")) == []
    assert stopped(stage.request("d")) == ["a"]


def served(stage: Stage, name: str, tokens: int) -> StartStep:
    """A trajectory that has generated so much, with its next step running."""
    stage.submit(name)
    stage.finish(stage.generating(name), new_tokens=tokens)
    return stage.generating(name, 1)


def test_autellix_stops_a_step_of_a_lower_queue_for_one_of_a_higher() -> None:
    stage = Stage("autellix")
    stage.join("E1", slots=1)
    running = served(stage, "old", 600)  # the first queue ends at 512 tokens
    assert running.priority == Priority(-1)
    stage.submit("new")
    start, order = stage.request("new")
    assert isinstance(start, StartStep) and start.priority == Priority(0)
    assert order == AbortStep(*identity(running), reason="preempted for new")


def test_autellix_stops_nobody_within_a_queue_nor_for_a_lower_one() -> None:
    stage = Stage("autellix")
    stage.join("E1", slots=1)
    stage.submit("a", "b", "c")
    stage.finish(stage.generating("c"), new_tokens=600)
    stage.finish(stage.generating("a"), new_tokens=500)
    stage.generating("a", 1)
    assert stopped(stage.request("b")) == [], "500 and 0 tokens share the first queue"
    assert stopped(stage.request("c", 1)) == [], "it is in the second queue"


def test_autellix_stops_the_one_with_most_service_even_where_a_slot_is_soon_free() -> None:
    stage = Stage("autellix")
    stage.join("E1", slots=2)
    stage.submit("short")
    for index in range(60):  # its steps have 10 tokens: a slot is free at once
        stage.finish(stage.generating("short", index))
    stage.generating("short", 60)
    served(stage, "long", 5000)
    stage.submit("new")
    assert stopped(stage.request("new")) == ["long"]


def test_the_shortest_of_those_that_run_is_stopped() -> None:
    stage = crowded(3, a=800, b=300, c=500, d=4000)
    for name in "abc":
        stage.generating(name)
    assert stopped(stage.request("d")) == ["b"]


def test_nothing_is_stopped_while_a_slot_is_free() -> None:
    stage = crowded(2, a=10, b=5000)
    stage.generating("a")
    assert stopped(stage.request("b")) == []


def test_a_queued_step_is_not_stopped_for_it_holds_no_slot() -> None:
    stage = crowded(1, a=5000, b=10, c=4000)
    stage.generating("a")
    stage.placed("b")
    assert stopped(stage.request("c")) == [], "a is longer, b waits itself"


def test_a_step_that_waits_in_the_engine_itself_is_not_stopped_until_it_has_a_slot() -> None:
    stage = crowded(1, a=1000, b=10, c=20, d=4000, e=9000)
    first = stage.generating("a")
    for name in "bc":
        stage.generating(name)  # sent ahead: the engine has one slot
    assert stopped(stage.request("d")) == ["a"], "b and c are shorter, and hold nothing"
    stage.finish(first, 10)
    # The slot is c's now, whose priority is higher than b's, whatever came first.
    assert list(stage.controller.state.engines[EngineId("E1")].running) == ["c"]
    assert stopped(stage.request("e")) == ["c"]


def test_who_stops_another_does_not_wait_at_the_worker_for_the_slot() -> None:
    stage = crowded(a=1000, b=2000, c=100)
    assert not stage.generating("a").bypass_queue
    start, _ = stage.request("b")
    assert isinstance(start, StartStep)
    assert start.bypass_queue
    (other,) = stage.request("c")
    assert isinstance(other, StartStep)
    assert not other.bypass_queue


def test_without_a_prediction_nobody_is_stopped() -> None:
    stage = Stage(overrides=LONGEST_FIRST)
    stage.join("E1", slots=1)
    stage.submit("a", "b")
    stage.generating("a")
    assert stopped(stage.request("b")) == []


def test_no_preemption_in_a_preset_without_it() -> None:
    stage = Stage(overrides=[*LONGEST_FIRST, "preemption=none"])
    stage.join("E1", slots=1)
    stage.submit("a", "b")
    stage.predict("b", 9000)
    stage.generating("a")
    assert stopped(stage.request("b")) == []


# -- one victim per new step -----------------------------------------------------------------------------


def test_a_second_waiting_step_stops_a_second_running_one_and_a_third_none() -> None:
    stage = crowded(2, a=10, b=20, c=5000, d=6000, e=9000)
    stage.generating("a")
    stage.generating("b")
    assert stopped(stage.request("c")) == ["a"]
    assert stopped(stage.request("d")) == ["b"]
    assert stopped(stage.request("e")) == [], "both slots are about to be free, and none is left to stop"


def test_a_slot_that_is_about_to_be_free_serves_the_next_step() -> None:
    """The step that a slot was cleared for is withdrawn: the next one needs no second victim."""
    stage = crowded(2, a=10, b=20, c=5000, d=6000)
    stage.generating("a")
    stage.generating("b")
    assert stopped(stage.request("c")) == ["a"]
    stage.end("c")
    assert stopped(stage.request("d")) == []


# -- what it had is kept ---------------------------------------------------------------------------------


def test_the_tokens_of_a_stopped_step_are_kept_and_it_goes_on_from_them() -> None:
    stage = crowded(a=1000, b=2000)
    running = stage.generating("a")
    preempting = stage.request("b")[0]
    assert isinstance(preempting, StartStep)
    assert stage.finish(running, new_tokens=40, reason="abort") == [], "no step has finished: no prediction"
    record = stage.trajectory("a")
    assert (record.context_tokens, record.generated_tokens, record.open_step_tokens) == (140, 40, 40)
    assert (record.steps_finished, record.step_tokens, record.stopping) == (0, [], False)
    stage.start(preempting)
    rest = stage.placed("a", attempt=1, context=140)
    assert rest.engine_id == running.engine_id, "where its KV cache is"
    assert rest.priority.tokens == 1000, "what it generated meanwhile does not make it longer"
    stage.finish(preempting)
    stage.start(rest)
    assert stage.finish(rest, new_tokens=60) == [PredictRemaining(rest.step_id.trajectory_id)]
    assert (record.steps_finished, record.step_tokens, record.open_step_tokens) == (1, [100], 0)


def test_a_stopped_step_that_had_just_ended_is_simply_finished() -> None:
    stage = crowded(a=1000, b=2000)
    running = stage.generating("a")
    stage.request("b")
    assert stage.finish(running, new_tokens=40) == [PredictRemaining(running.step_id.trajectory_id)]
    assert (stage.trajectory("a").stopping, stage.trajectory("a").steps_finished) == (False, 1)


def test_a_stopped_step_whose_worker_dies_is_placed_anew_and_is_stopping_no_more() -> None:
    stage = crowded(a=1000, b=2000)
    running = stage.generating("a")
    stage.request("b")
    stage.lose("E1")
    record = stage.trajectory("a")
    assert (record.state, record.stopping) == (TrajectoryState.WAITING, False)
    commands = stage.join("E2", slots=2)
    assert [c.step_id.trajectory_id for c in commands if isinstance(c, StartStep)] == ["a", "b"]
    stage.late(ev.StepFinished, *identity(running), 40, 0, "abort")


def test_a_trajectory_that_ends_while_it_is_stopping_is_aborted_once_more_and_gone() -> None:
    stage = crowded(a=1000, b=2000)
    running = stage.generating("a")
    stage.request("b")
    assert stage.end("a") == [AbortStep(*identity(running), reason="trajectory ended")]
    stage.late(ev.StepFinished, *identity(running), 40, 0, "abort")


# -- a bounded number of times ---------------------------------------------------------------------------


def test_a_step_is_stopped_at_most_so_often_and_the_next_step_counts_anew() -> None:
    names = [f"n{number}" for number in range(4)]
    stage = crowded(retries=RetryPolicy(max_preemptions=2), a=100, **dict.fromkeys(names, 5000.0))
    for attempt, name in enumerate(names[:3]):
        running = stage.generating("a", attempt=attempt)
        commands = stage.request(name)
        assert stopped(commands) == (["a"] if attempt < 2 else [])
        assert isinstance(commands[0], StartStep)
        stage.finish(running, new_tokens=1, reason="abort")
        stage.finish(commands[0])
        stage.end(name)
    stage.finish(stage.generating("a", attempt=3))
    stage.predict("a", 100)
    stage.generating("a", 1)
    assert stopped(stage.request(names[3])) == ["a"]


def test_two_that_are_nearly_equal_do_not_swap_for_ever() -> None:
    """What a stopped step generated must not make it outrank the one that stopped it."""
    stage = crowded(retries=RetryPolicy(max_preemptions=1000), a=1000, b=1600)
    running = stage.generating("a")
    commands = stage.request("b")
    assert stopped(commands) == ["a"]
    stage.finish(running, new_tokens=2000, reason="abort")
    assert isinstance(commands[0], StartStep)
    stage.start(commands[0])
    assert stopped(stage.request("a", attempt=1)) == []


@dataclass
class Wild:
    """Proposes a victim that is no candidate: the preempting step itself."""

    def victim(self, waiting: Trajectory, running: object) -> Trajectory:
        return waiting


def test_a_victim_that_was_not_offered_is_refused() -> None:
    chosen = replace(build_strategies("sticky", overrides=LONGEST_FIRST), preemption=Wild())
    stage = Stage(strategies=chosen)
    stage.join("E1", slots=1)
    stage.submit("a", "b")
    stage.generating("a")
    with pytest.raises(GuardViolation, match=r"preemption chose b \(queued\) for b; it may choose among: a"):
        stage.request("b")
