"""Admission by KV memory and placement where room is: the longest that fits starts next, wherever that is."""

from __future__ import annotations

import pytest
from core_builders import Stage, engine_of, host_of, step_of, trajectory_spec
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core import events as ev
from heddle_dask.core.commands import AdmitTrajectory, Command, StartStep
from heddle_dask.core.errors import BadInput
from heddle_dask.strategies.kv_fit import KvFit
from heddle_dask.strategies.presets import build_strategies
from heddle_dask.strategies.roomiest import Roomiest


def stage_of(*overrides: str, predictor: str = "oracle") -> Stage:
    parts = [
        "admission=kv-fit,growth=1.0,fill=1.0",
        "placement=roomiest,growth=1.0",
        f"predictor={predictor}",
    ]
    return Stage(strategies=build_strategies("sticky", overrides=[*parts, *overrides]))


def admitted(commands: list[Command]) -> list[str]:
    return [str(c.trajectory_id) for c in commands if isinstance(c, AdmitTrajectory)]


def submit(stage: Stage, *rows: tuple[str, int, float]) -> list[str]:
    """Name, prompt and prediction of each; all are submitted before the first is predicted."""
    out: list[str] = []
    for name, prompt, _ in rows:
        out += admitted(stage.feed(ev.TrajectorySubmitted, trajectory_spec(name, prompt)))
    for name, _, tokens in rows:
        out += admitted(stage.feed(ev.PredictionMade, name, 0, tokens, tokens, 0.0, 0.0))
    return out


def place(stage: Stage, name: str, context: int, index: int = 0) -> str:
    (start,) = [
        c
        for c in stage.feed(ev.StepRequested, step_of(name, index, context=context))
        if isinstance(c, StartStep)
    ]
    return str(start.engine_id)


def test_nobody_is_admitted_before_it_is_predicted() -> None:
    stage = stage_of()
    stage.feed(ev.EngineJoined, engine_of("A", kv_tokens=1000))
    assert admitted(stage.feed(ev.TrajectorySubmitted, trajectory_spec("a", 10))) == []
    assert admitted(stage.feed(ev.PredictionMade, "a", 0, 50.0, 60.0, 0.0, 0.0)) == ["a"]


def test_without_a_predictor_the_order_of_arrival_decides() -> None:
    stage = stage_of(predictor="none")
    stage.feed(ev.EngineJoined, engine_of("A", slots=2, kv_tokens=250))
    out = [admitted(stage.feed(ev.TrajectorySubmitted, trajectory_spec(n, 100))) for n in "abc"]
    assert out == [["a"], ["b"], []]


def test_the_longest_that_waits_starts_when_there_is_room_for_it() -> None:
    stage = stage_of()
    stage.feed(ev.EngineJoined, engine_of("A", kv_tokens=1000))
    # The first takes 600 as it will be on average; no other has room beside it.
    assert submit(stage, ("a", 100, 500.0), ("short", 100, 350.0), ("long", 100, 800.0)) == ["a"]
    place(stage, "a", 100)
    assert admitted(stage.feed(ev.TrajectoryEnded, "a", "completed")) == ["long"]


def test_room_is_counted_by_engine_and_not_in_all() -> None:
    stage = stage_of()
    for name in "AB":
        stage.feed(ev.EngineJoined, engine_of(name, kv_tokens=1000))
    # 400 are free on each engine, 800 in all.
    assert submit(stage, ("a", 100, 500.0), ("b", 100, 500.0), ("c", 100, 400.0)) == ["a", "b"]
    assert {place(stage, "a", 100), place(stage, "b", 100)} == {"A", "B"}
    assert admitted(stage.feed(ev.PredictionMade, "a", 0, 300.0, 300.0, 0.0, 0.0)) == []
    stage.feed(ev.StepStarted, "a", 0, 0, "A")
    # A step of 50 tokens ends, and little is predicted to be left: 150 and 350 are promised on A.
    assert admitted(stage.feed(ev.StepFinished, "a", 0, 0, "A", 50, 0, "length")) == ["c"]


def test_an_engine_always_has_one_however_large_it_is() -> None:
    stage = stage_of()
    stage.feed(ev.EngineJoined, engine_of("A", max_context_tokens=100_000, kv_tokens=1000))
    assert submit(stage, ("a", 5000, 9000.0), ("b", 10, 10.0)) == ["a"]


def test_the_queue_is_bounded_by_slots_and_tools_do_not_count() -> None:
    stage = stage_of("admission=kv-fit,per_slot=1.5")
    stage.feed(ev.EngineJoined, engine_of("A", slots=2))
    stage.feed(ev.HostJoined, host_of("H"))
    names = [(f"t{i}", 10, 100.0) for i in range(6)]
    assert submit(stage, *names) == ["t0", "t1", "t2"], "1.5 a slot, and memory is unknown"
    for name in ("t0", "t1", "t2"):
        place(stage, name, 10)
    stage.feed(ev.StepStarted, "t0", 0, 0, "A")
    assert admitted(stage.feed(ev.StepFinished, "t0", 0, 0, "A", 5, 0, "stop")) == ["t3"], (
        "t0 is in a tool now"
    )


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=30), st.integers(1, 4)
)
def test_what_is_promised_fits_and_nobody_waits_for_ever(rows: list[tuple[int, int]], engines: int) -> None:
    stage = stage_of("admission=kv-fit,growth=1.0,fill=1.0,per_slot=100")
    for number in range(engines):
        stage.feed(ev.EngineJoined, engine_of(f"E{number}", kv_tokens=1000))
    waiting = [(f"t{i}", prompt, float(tokens)) for i, (prompt, tokens) in enumerate(rows)]
    alive, ended = submit(stage, *waiting), 0
    prompts = {name: prompt for name, prompt, _ in waiting}
    while alive:
        for name in alive:
            place(stage, name, prompts[name])
        for engine in stage.state.engines.values():
            promised = engine.resident_tokens + engine.expected_tokens
            assert promised <= 1000, "all contexts are at most 800: they fit as they will be"
        alive_now, alive = alive, []
        for name in alive_now:
            alive += admitted(stage.feed(ev.TrajectoryEnded, name, "completed"))
            ended += 1
    assert ended == len(rows)


def test_the_scarcer_of_memory_and_slots_decides_where() -> None:
    stage = stage_of("admission=unlimited")
    stage.feed(ev.EngineJoined, engine_of("roomy", slots=1, kv_tokens=10_000))
    stage.feed(ev.EngineJoined, engine_of("slotty", slots=8, kv_tokens=1000))
    submit(stage, *[(f"t{i}", 0, 1.0) for i in range(8)])
    assert place(stage, "t0", 600) == "roomy", "0.6 of the other's memory"
    assert place(stage, "t1", 100) == "slotty", "the roomy one has half of its residents already"


def test_a_group_comes_together_where_memory_is_scarce() -> None:
    stage = stage_of("admission=unlimited")
    for name in "AB":
        stage.feed(ev.EngineJoined, engine_of(name, slots=64, kv_tokens=1000))
    for name, group in (("a", "g"), ("x", "h"), ("b", "g")):
        stage.feed(ev.TrajectorySubmitted, trajectory_spec(name, 300, group))
    assert place(stage, "a", 300) == "A"
    assert place(stage, "x", 250) == "B"
    assert place(stage, "b", 310) == "A", "its group's prompt is there, though B has more room"


@pytest.mark.parametrize(
    "wrong", ["fill=0", "growth=-1", "per_slot=0", "quantile=mean"], ids=lambda text: text.split("=")[0]
)
def test_kv_fit_refuses_what_cannot_work(wrong: str) -> None:
    with pytest.raises(BadInput, match="kv-fit"):
        build_strategies("heddle", overrides=[f"admission=kv-fit,{wrong}"])


def test_heddle_uses_both() -> None:
    built = build_strategies("heddle")
    assert isinstance(built.admission, KvFit) and isinstance(built.placement, Roomiest)
