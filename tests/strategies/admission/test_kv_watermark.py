"""Admission by a watermark on KV use: when the limit of live trajectories rises and falls."""

from __future__ import annotations

import pytest
from worlds.core_builders import Stage, trajectory_spec

from heddle_dask.core.commands import AdmitTrajectory, Command
from heddle_dask.core.entities import Trajectory
from heddle_dask.core.events import StepFinished
from heddle_dask.core.ids import EngineId, StepId
from heddle_dask.core.policy_version import PolicyVersion
from heddle_dask.strategies.admission.kv_watermark import KvWatermark

PRESSURE = "admission=kv-watermark,low=0.5,high=0.8,cut=0.5,per_slot="


def admitted(commands: list[Command]) -> list[str]:
    return [c.trajectory_id for c in commands if isinstance(c, AdmitTrajectory)]


def names(count: int, prefix: str = "t") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def under_pressure(kv_tokens: int, *, slots: int = 2, per_slot: float = 1) -> Stage:
    stage = Stage(overrides=[f"{PRESSURE}{per_slot}"])
    stage.join("E1", slots=slots, kv_tokens=kv_tokens)
    return stage


def test_a_burst_is_admitted_up_to_the_floor_only() -> None:
    """Nothing holds a context yet: that the KV cache is empty says nothing about those just admitted."""
    stage = under_pressure(10_000)
    assert admitted(stage.submit(*names(20))) == ["t0", "t1"]


def test_the_limit_rises_by_one_with_each_answer_while_kv_is_free() -> None:
    stage = under_pressure(10_000)
    stage.submit(*names(20))
    first = stage.generating("t0")
    second = stage.generating("t1")
    assert admitted(stage.finish(first)) == ["t2"]
    assert admitted(stage.finish(second)) == [], "t2 has not shown what it takes"
    assert admitted(stage.finish(stage.generating("t2"))) == ["t3"]
    assert stage.state.alive == 4


def test_the_limit_stands_between_low_and_high() -> None:
    stage = under_pressure(1000)
    stage.submit(*names(5))
    steps = [stage.generating(name, context=300) for name in names(2)]
    assert [admitted(stage.finish(step)) for step in steps] == [[], []]
    assert admitted(stage.end("t0")) == ["t2"], "who ends is replaced"


def test_above_high_the_limit_is_cut_and_holds_until_enough_have_ended() -> None:
    stage = under_pressure(1000, slots=1)
    stage.submit(*names(12))
    for number in range(3):  # short ones: it rises
        assert admitted(stage.finish(stage.generating(f"t{number}", context=50))) == [f"t{number + 1}"]
    step = stage.placed("t3", context=50)
    stage.finish(step)
    assert stage.state.alive == 5
    for number in range(4):  # they grow to 880 tokens of 1000
        stage.finish(stage.placed(f"t{number}", 1, context=210))
    assert stage.state.alive == 5, "nothing is taken back"
    assert admitted(stage.end("t4")) == [], "half of five, and four are alive"
    assert admitted(stage.end("t0")) == []
    assert stage.state.alive == 3


def test_the_floor_is_what_contexts_of_now_fill_and_one_an_engine_at_least() -> None:
    stage = under_pressure(1000, slots=3)
    stage.submit(*names(9))
    assert stage.state.alive == 3
    for name in names(3):
        stage.finish(stage.generating(name, context=300))
    assert stage.state.alive == 3
    assert admitted(stage.end("t0")) == [], "two take 600 of 1000 already"
    assert admitted(stage.end("t1")) == ["t3"], "the slots for two, and half of the memory holds one of 300"
    for name in ("t2", "t3"):
        stage.finish(stage.generating(name, int(name == "t2"), context=900))
    assert admitted(stage.end("t2")) == [], "one engine, one trajectory, whatever it takes"
    assert admitted(stage.end("t3")) == ["t4", "t5", "t6"], "the memory is empty"


def test_per_slot_scales_the_floor() -> None:
    assert len(admitted(under_pressure(10_000, slots=2, per_slot=1.5).submit(*names(9)))) == 3
    assert len(admitted(under_pressure(10_000, slots=8, per_slot=0.25).submit(*names(9)))) == 2


def test_contexts_that_were_thrown_out_cut_the_limit() -> None:
    stage = under_pressure(100_000, slots=2)
    stage.submit(*names(20))
    for number in range(6):  # nothing is short: one more with each answer
        assert admitted(stage.finish(stage.generating(f"t{number}", context=1000))) != [] or number == 0
    alive = stage.state.alive
    stage.finish(stage.generating("t0", 1, context=1200), cached=960)
    assert (stage.state.evictions, stage.state.alive) == (0, alive)
    assert len(admitted(stage.end("t0"))) == 1, "who ends is replaced"
    stage.finish(stage.generating("t1", 1, context=1200), cached=0)
    assert (stage.state.evictions, stage.state.alive) == (1, alive)
    ended = 0
    while not admitted(stage.end(f"t{2 + ended}")):
        ended += 1
    assert stage.state.alive == alive // 2 and ended == alive - alive // 2


def test_what_was_thrown_out_at_the_end_of_a_batch_is_not_held_against_the_next() -> None:
    """No trajectory waits in its tail, so the admission is not called."""
    stage = under_pressure(100_000, slots=4)
    stage.submit(*names(4))
    for name in names(4):
        stage.finish(stage.generating(name, context=1000))
    stage.finish(stage.generating("t0", 1, context=2000), cached=0)
    assert stage.state.evictions == 1
    for name in names(4):
        stage.end(name)
    assert len(admitted(stage.submit(*names(9, "n")))) == 4
    rounds = [len(admitted(stage.finish(stage.generating(f"n{n}", context=1000)))) for n in range(5)]
    assert rounds == [0, 0, 0, 1, 1], "with every answer, once all that are alive hold a context"


def test_after_the_first_shortage_the_limit_rises_by_one_an_engine_and_round() -> None:
    stage = under_pressure(100_000, slots=4)
    stage.submit(*names(40))
    stage.finish(stage.generating("t0", context=1000))
    stage.finish(stage.generating("t0", 1, context=2000), cached=0)
    for number in range(1, 4):
        stage.finish(stage.generating(f"t{number}", context=1000))
    assert stage.state.evictions == 1
    rounds = [
        sum(len(admitted(stage.finish(stage.generating(f"t{n}", i, context=2000)))) for n in range(4))
        for i in (2, 3)
    ]
    assert rounds == [1, 0], "the newly admitted one has no result in the second round"


def evicted(
    engine: str = "E1", context: int = 4200, new: int = 10, cached: int = 100, policy: int = 2
) -> bool:
    """Whether E1, which had 4,000 tokens of a context by policy 2, has lost them, as the next answer tells."""
    made = Trajectory(trajectory_spec("a"), 1)
    made.kept_on, made.kept_tokens = EngineId("E1"), 4000
    made.kv_version = PolicyVersion("", 2)
    made.context_tokens = context
    return made.was_evicted(
        StepFinished(1.0, StepId(made.trajectory_id, 1, 0), EngineId(engine), new, cached, "stop", policy)
    )


def test_a_context_is_evicted_where_its_engine_computes_most_of_it_anew() -> None:
    assert evicted()
    assert not evicted(cached=3968)
    assert not evicted(cached=2100), "a part of it"
    assert not evicted("E2"), "it went elsewhere"
    assert not evicted(new=0, cached=0), "stopped before it began"
    assert not evicted(context=900), "another prompt, not a continuation"
    assert not evicted(policy=3), "other weights"


def test_a_short_context_is_never_evicted() -> None:
    """It may be less than a block, which no cache keeps."""
    stage = Stage()
    stage.join("E1")
    stage.submit("t0")
    stage.finish(stage.generating("t0", context=100))
    stage.finish(stage.generating("t0", 1, context=150), cached=0)
    assert stage.state.evictions == 0


def test_an_engine_that_joins_raises_the_floor_at_once() -> None:
    """Submitted before any engine: no other event calls the admission before the first one ends."""
    stage = Stage(overrides=[f"{PRESSURE}1"])
    assert admitted(stage.submit(*names(9))) == ["t0"]
    assert admitted(stage.join("E1", slots=4, kv_tokens=1000)) == ["t1", "t2", "t3"]
    assert len(admitted(stage.join("E2", slots=3, kv_tokens=1000))) == 3


@pytest.mark.parametrize("known", [[0], [0, 10_000]])
def test_engines_that_do_not_tell_their_capacity_bound_nothing(known: list[int]) -> None:
    stage = Stage(overrides=[f"{PRESSURE}1"])
    for number, kv_tokens in enumerate(known):
        stage.join(f"E{number}", kv_tokens=kv_tokens)
    assert len(admitted(stage.submit(*names(50)))) == 50


def test_a_slow_trickle_does_not_bank_a_limit_for_a_later_burst() -> None:
    stage = under_pressure(100_000, slots=2)
    for name in names(30, "s"):
        stage.submit(name)
        stage.finish(stage.generating(name))
        stage.end(name)
    assert len(admitted(stage.submit(*names(30)))) == 2


@pytest.mark.parametrize(
    "wrong",
    [{"low": 0.9, "high": 0.5}, {"low": 0.0}, {"cut": 1.0}, {"cut": 0.0}, {"rise": 0}, {"per_slot": 0}],
)
def test_kv_pressure_refuses_what_cannot_work(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="use 0 < low <= high"):
        KvWatermark(**wrong)  # type: ignore[arg-type]
