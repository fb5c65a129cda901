"""Two runs in one controller, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds.core_builders import Stage, action_of, step_of, trajectory_spec

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.commands import Command
from heddle_dask.core.controller import Controller
from heddle_dask.core.ids import FIRST_RUN, ActionId, EngineId, HostId, RunId, TrajectoryId
from heddle_dask.core.journal_codec import replay
from heddle_dask.core.resources import Amounts, ResourceDemand
from heddle_dask.core.run_description import RunDescription
from heddle_dask.core.run_strategies import RunView
from heddle_dask.core.view import ClusterView
from heddle_dask.strategies.described import strategies_of_description

SECOND = RunId("2")


def two_runs(
    strategy: str = "sticky-least-loaded",
    weights: tuple[float, float] = (1.0, 1.0),
    overrides: tuple[str, ...] = (),
    joins: bool = True,
) -> Stage:
    """A stage whose controller a second run may join, and has joined unless told otherwise."""
    first = RunDescription(strategy=strategy, weight=weights[0], overrides=overrides)
    stage = Stage(strategies=strategies_of_description(first))
    stage.controller = Controller(strategies_of_description(first), None, strategies_of_description)
    stage.feed(ev.RunStarted, first)
    if joins:
        join(stage, strategy, weights[1], overrides)
    return stage


def join(
    stage: Stage, strategy: str = "sticky-least-loaded", weight: float = 1.0, overrides: tuple[str, ...] = ()
) -> list[Command]:
    return stage.feed(ev.RunStarted, RunDescription(SECOND, "second", weight, strategy, overrides))


def submit(stage: Stage, name: str, prompt_tokens: int = 0) -> list[Command]:
    """A trajectory of the run that its name says: ``a1`` of the first, ``b1`` of the second."""
    run_id = SECOND if name.startswith("b") else FIRST_RUN
    return stage.feed(ev.TrajectorySubmitted, replace(trajectory_spec(name, prompt_tokens), run_id=run_id))


def started(commands: list[Command]) -> list[str]:
    return [c.step_id.trajectory_id for c in commands if isinstance(c, cmd.StartStep)]


def admitted(commands: list[Command]) -> list[str]:
    return [c.trajectory_id for c in commands if isinstance(c, cmd.AdmitTrajectory)]


def test_alone_all_steps_are_sent_and_those_that_wait_come_back_when_another_run_joins() -> None:
    stage = two_runs(joins=False)
    stage.join("E", slots=4)
    steps = []
    for number in range(8):
        submit(stage, f"a{number}")
        steps.append(stage.placed(f"a{number}"))
    for step in steps[:4]:
        stage.start(step)
    recalled = join(stage)
    assert [(type(c), c.reason) for c in recalled] == [(cmd.AbortStep, cmd.RECALLED)] * 3, "one bridges the way"
    for command in recalled:
        assert isinstance(command, cmd.AbortStep)
        assert stage.feed(ev.StepFinished, command.step_id, command.engine_id, 0, 0, "abort") == []
        name, index, attempt = command.step_id
        assert stage.request(name, index, attempt=attempt + 1) == [], "it is held"
    submit(stage, "b0")
    assert stage.request("b0") == []
    served = started(stage.finish(steps[0])) + started(stage.finish(steps[1]))
    assert len(served) == 2 and "b0" in served, "runs take turns"
    lines = [[event, commands] for event, commands in stage.journal]
    first = RunDescription()
    fresh = Controller(strategies_of_description(first), None, strategies_of_description)
    assert list(replay(fresh, lines)) == []


def test_places_go_to_runs_by_weight_and_inside_a_run_by_priority() -> None:
    stage = two_runs("heddle", (1.0, 3.0), ("admission=unlimited", "predictor=oracle", "preemption=none"))
    stage.join("E", slots=4, kv_tokens=100_000)
    for number in range(12):
        for run in "ab":
            submit(stage, f"{run}{number}")
            stage.predict(f"{run}{number}", 100.0 * (number + 1))
    sent: list[str] = []
    for number in range(12):
        for run in "ab":
            sent += started(stage.request(f"{run}{number}"))
    running = list(sent)
    served: list[str] = []
    while running:
        name = running.pop(0)
        step = stage.trajectory(name).step
        assert step is not None
        stage.feed(ev.StepStarted, step.step_id, EngineId("E"))
        new = started(stage.feed(ev.StepFinished, step.step_id, EngineId("E"), 5, 0, "stop"))
        served += new
        running += new
    while_both_wait = served[:10]
    of_second = sum(name.startswith("b") for name in while_both_wait)
    assert 6 <= of_second <= 9
    numbers = [int(name[1:]) for name in served if name.startswith("b")]
    assert numbers == sorted(numbers, reverse=True), "the longest first"


def test_a_run_over_its_share_of_the_memory_admits_nothing_while_another_waits() -> None:
    stage = two_runs(weights=(1.0, 3.0), overrides=("admission=at-most,alive=2",))
    stage.join("E", slots=8, kv_tokens=1000)
    for name, context in (("a0", 100), ("a1", 600)):
        assert submit(stage, name) == [cmd.AdmitTrajectory(TrajectoryId(name))]
        stage.request(name, context=context)
    submit(stage, "a2")
    for name in ("b0", "b1"):
        assert submit(stage, name) == [cmd.AdmitTrajectory(TrajectoryId(name))]
    assert submit(stage, "b2") == [], "its strategy declines"
    assert admitted(stage.end("b1")) == ["b2"]
    submit(stage, "b3")
    assert admitted(stage.end("a0")) == [], "it holds 600 of 1,000 tokens, and its share is a quarter"
    assert admitted(stage.end("b3")) == ["a2"], "nobody else waits: the rest is lent"


def test_a_run_that_ends_gives_back_all_that_it_had() -> None:
    stage = two_runs()
    stage.join("E", slots=2)
    stage.add_host("H", cpus=1)
    for name in ("a0", "a1", "a2", "b0", "b1"):
        submit(stage, name)
    running = {name: stage.generating(name) for name in ("a0", "a1", "a2")}
    assert stage.request("b0") == []
    (run,) = [c for c in stage.feed(ev.ActionRequested, action_of("x", "b1")) if isinstance(c, cmd.RunAction)]
    submit(stage, "a3")
    stage.feed(ev.ActionRequested, action_of("y", "a3"))
    commands = stage.feed(ev.RunEnded, FIRST_RUN)
    aborted = {c.step_id.trajectory_id for c in commands if isinstance(c, cmd.AbortStep)}
    assert aborted == set(running)
    assert started(commands) == ["b0"]
    assert not any(t.spec.run_id == FIRST_RUN for t in stage.state.trajectories.values())
    assert list(stage.state.actions) == [run.action_id]
    stage.late(ev.RunEnded, FIRST_RUN)
    assert stage.acted(run) == []


def test_actions_of_two_runs_take_turns() -> None:
    for preset in ("sticky-least-loaded", "heddle"):
        stage = two_runs(preset, (1.0, 1.0), ("admission=unlimited", "predictor=none", "migration=none"))
        stage.join("E", slots=4, kv_tokens=100_000)
        submit(stage, "a0")
        submit(stage, "b0")
        for number in range(12):
            stage.feed(ev.ActionRequested, action_of(f"a0:{number}", "a0"))
        for number in range(12):
            stage.feed(ev.ActionRequested, action_of(f"b0:{number}", "b0"))
        commands = stage.add_host("H", cpus=8)
        while any(isinstance(c, cmd.WakeUp) for c in commands):
            commands = stage.feed(ev.TimeReached)
        runs = [c for c in commands if isinstance(c, cmd.RunAction)]
        assert len(runs) == 8, preset
        assert sum(c.action_id.startswith("a0") for c in runs) == 4, preset


def test_a_trajectory_of_no_open_run_is_a_bug() -> None:
    stage = two_runs(joins=False)
    with pytest.raises(KeyError, match="of run 2, which is not open"):
        submit(stage, "b0")
    with pytest.raises(ValueError, match="builds no strategies"):
        Controller(strategies_of_description(RunDescription())).handle(ev.RunStarted(0.0, RunDescription(SECOND)))
    assert step_of("a").step_id.trajectory_id == "a"


def test_a_run_knows_its_own_trajectories() -> None:
    stage = two_runs()
    for name in ("a1", "b1"):
        submit(stage, name)
    view = RunView(stage.state, stage.state.runs[SECOND])
    assert [view.is_own(stage.trajectory(name)) for name in ("a1", "b1")] == [False, True]
    assert ClusterView(stage.state).is_own(stage.trajectory("a1"))


def test_held_steps_go_to_an_engine_that_joins_without_a_message() -> None:
    stage = two_runs()
    stage.join("E1", slots=2)
    for name in ("a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"):
        submit(stage, name)
        stage.request(name)
    commands = stage.join("E2", slots=2)
    assert len(started(commands)) == 2 and not any(isinstance(c, cmd.AbortStep) for c in commands)
    assert {name[0] for name in started(commands)} == {"a", "b"}, "runs take turns here too"
    assert all(stage.trajectory(name).home == EngineId("E2") for name in started(commands))


def test_the_allocation_of_actions_is_the_clusters() -> None:
    """The first run asks for least amounts; as soon as another one is open that does not, calls may use idle CPUs."""
    stage = two_runs(overrides=("actions=fcfs-minimum",), joins=False)
    stage.add_host("H", 4)

    def reached(name: str) -> list[int]:
        wanted = ResourceDemand.of(cpus=Amounts(1, 4))
        run = stage.feed(ev.ActionRequested, replace(action_of(name, name[:2]), demand=wanted))
        return [c.reach_cpus for c in run if isinstance(c, cmd.RunAction)]

    for name in ("a0", "a1", "a2"):
        submit(stage, name)
    assert reached("a0 1") == [0] and [reached(f"a1 {number}") for number in range(3)] == [[0]] * 3
    assert reached("a2 1") == [], "all CPUs are granted"
    join(stage)
    submit(stage, "b0")
    ended = stage.feed(ev.ActionFinished, ActionId("a0 1"), HostId("H"), 1.0)
    assert [(c.action_id, c.reach_cpus) for c in ended if isinstance(c, cmd.RunAction)] == [("a2 1", 4)]
    stage.feed(ev.RunEnded, SECOND)
    stage.feed(ev.ActionFinished, ActionId("a2 1"), HostId("H"), 1.0)
    assert reached("a0 2") == [0], "the first run is alone again"
