"""The opponent that places by the predicted work of each engine."""

from __future__ import annotations

from worlds.core_builders import Stage, engine_of, step_of, trajectory_spec

from benchmarks.opponents import LEAST_WORK
from heddle_dask.core import events as ev
from heddle_dask.core.commands import StartStep
from heddle_dask.core.nouns import Prediction
from heddle_dask.strategies.presets import build_strategies


def stage_of() -> Stage:
    overrides = [f"placement={LEAST_WORK}", "admission=unlimited", "predictor=oracle"]
    return Stage(strategies=build_strategies("sticky", overrides=overrides))


def submit(stage: Stage, *rows: tuple[str, int, float]) -> None:
    for name, prompt, _ in rows:
        stage.feed(ev.TrajectorySubmitted, trajectory_spec(name, prompt))
    for name, _, tokens in rows:
        stage.feed(ev.PredictionMade, name, 0, Prediction(tokens, tokens))


def place(stage: Stage, name: str, context: int) -> str:
    commands = stage.feed(ev.StepRequested, step_of(name, 0, context=context))
    (start,) = [command for command in commands if isinstance(command, StartStep)]
    return str(start.engine_id)


def test_the_least_work_among_those_with_room_decides_where() -> None:
    stage = stage_of()
    for name, kv in (("small", 1000), ("large", 100_000)):
        stage.feed(ev.EngineJoined, engine_of(name, slots=8, kv_tokens=kv))
    submit(stage, ("a", 10, 500.0), ("b", 10, 100.0), ("c", 700, 300.0), ("d", 10, 1.0))
    assert place(stage, "a", 10) == "small", "the first of equals"
    assert place(stage, "b", 10) == "large", "600 tokens of work there against none here"
    assert place(stage, "c", 700) == "large", "no room in the small one"


def test_a_group_comes_together_where_its_prompt_costs_more_than_the_imbalance() -> None:
    stage = stage_of()
    for name in "AB":
        stage.feed(ev.EngineJoined, engine_of(name, slots=64, kv_tokens=100_000))
    for name, group in (("a", "g"), ("x", "h"), ("b", "g")):
        stage.feed(ev.TrajectorySubmitted, trajectory_spec(name, 3000, group))
        stage.feed(ev.PredictionMade, name, 0, Prediction(20.0, 20.0))
    assert place(stage, "a", 3000) == "A"
    assert place(stage, "x", 2000) == "B"
    assert place(stage, "b", 3010) == "A", "3,000 tokens of its prompt are there"
