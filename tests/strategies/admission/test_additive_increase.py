"""Admission that probes: when the limit of live trajectories starts, rises, and is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.core_builders import Stage

from heddle_dask.core.commands import AdmitTrajectory, Command
from heddle_dask.strategies.admission.additive_increase import AdditiveIncrease

# The engines of a stage take contexts of 4,096 tokens, and its clock goes on by a second with each event.
CONTEXT = 4096


def admitted(commands: list[Command]) -> list[str]:
    return [c.trajectory_id for c in commands if isinstance(c, AdmitTrajectory)]


def names(count: int) -> list[str]:
    return [f"t{number}" for number in range(count)]


def probing(kv_tokens: int, options: str = "", *, slots: int = 64) -> Stage:
    stage = Stage(overrides=[f"admission=additive-increase,poll_s=0.001{options}"])
    stage.join("E1", slots=slots, kv_tokens=kv_tokens)
    return stage


def limit_of(stage: Stage) -> float:
    admission = stage.controller.strategies.admission
    assert isinstance(admission, AdditiveIncrease)
    return admission._limit


def test_it_starts_with_what_fits_if_every_context_is_full() -> None:
    stage = probing(4 * CONTEXT)
    assert admitted(stage.submit(*names(20))) == names(4)
    assert len(admitted(stage.join("E2", slots=4, kv_tokens=3 * CONTEXT))) == 3


def test_each_one_that_ends_adds_a_constant_while_engines_are_calm() -> None:
    stage = probing(10 * CONTEXT, ",growth=2")
    stage.submit(*names(60))
    for name in names(10):
        stage.finish(stage.generating(name, context=100))
    limits = [limit_of(stage)]
    for name in names(10):
        stage.end(name)
        limits.append(limit_of(stage))
    assert limits[0] == 10
    assert all(0.65 < after - before < 0.8 for before, after in pairwise(limits)), "about ln(growth)"
    assert stage.state.alive == int(limit_of(stage))


def test_it_rises_only_while_the_limit_is_reached() -> None:
    stage = probing(10 * CONTEXT)
    stage.submit(*names(8))
    for name in names(8):
        stage.finish(stage.generating(name, context=100))
    for name in names(8):
        stage.end(name)
        stage.submit(f"after {name}")
    assert limit_of(stage) == 10


def test_above_high_it_is_trimmed_to_the_target_and_nobody_is_stopped() -> None:
    stage = probing(4 * CONTEXT)
    stage.submit(*names(20))
    for name in names(4):
        stage.generating(name, context=3686)  # 0.9 of the memory in all
    assert admitted(stage.submit("more")) == []
    assert limit_of(stage) == pytest.approx(4 * 0.7 / 0.9, rel=0.01)
    assert stage.state.alive == 4
    assert admitted(stage.end("t0")) == [], "three may live"
    assert admitted(stage.end("t1")) == ["t4"]


def test_between_low_and_high_it_stands() -> None:
    stage = probing(4 * CONTEXT)
    stage.submit(*names(20))
    for name in names(4):
        stage.generating(name, context=2867)  # 0.7
    stage.submit("more")
    assert len(admitted(stage.end("t0"))) == 1, "who ends is replaced"
    assert limit_of(stage) == 4


def test_contexts_that_were_evicted_cut_it_once_until_the_rest_has_ended() -> None:
    stage = probing(10 * CONTEXT)
    stage.submit(*names(60))
    for name in names(10):
        stage.finish(stage.generating(name, context=1000))
    for name in names(2):
        stage.finish(stage.generating(name, 1, context=1200), cached=0)
    assert stage.state.evictions == 2
    assert limit_of(stage) == pytest.approx(8), "0.8 of ten, and not again for the second"
    assert [len(admitted(stage.end(name))) for name in names(3)] == [0, 0, 1]


def test_steps_that_wait_for_long_cut_it() -> None:
    stage = probing(10 * CONTEXT, slots=2)
    stage.submit(*names(60))
    for name in names(2):
        stage.generating(name, context=10)
    for name in names(10)[2:]:
        stage.placed(name, context=10)
    for number in range(6):
        stage.submit(f"more{number}")
    assert limit_of(stage) == pytest.approx(9)


@pytest.mark.parametrize("known", [[0], [0, 10_000]])
def test_engines_that_do_not_tell_their_capacity_bound_nothing(known: list[int]) -> None:
    stage = Stage(overrides=["admission=additive-increase"])
    for number, kv_tokens in enumerate(known):
        stage.join(f"E{number}", kv_tokens=kv_tokens)
    assert len(admitted(stage.submit(*names(50)))) == 50


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(100, 4000), st.booleans()), min_size=1, max_size=40))
def test_there_is_always_one_alive_and_never_more_than_the_limit_admits(
    steps: list[tuple[int, bool]],
) -> None:
    stage = probing(3 * CONTEXT)
    stage.submit(*names(60))
    index: dict[str, int] = {}
    for number, (context, ends) in enumerate(steps):
        alive = [name for name in names(60) if stage.state.trajectories.get(name) and is_alive(stage, name)]
        assert alive, "somebody goes on"
        name = alive[number % len(alive)]
        at = index.setdefault(name, 0)
        stage.finish(stage.generating(name, at, context=min(CONTEXT - 50, context)), cached=0)
        index[name] = at + 1
        before, most = stage.state.alive, max(stage.state.alive, int(limit_of(stage)))
        if ends:
            stage.end(name)
        assert stage.state.alive <= max(before, most, int(limit_of(stage)))


def is_alive(stage: Stage, name: str) -> bool:
    return name not in stage.state.unadmitted


@pytest.mark.parametrize(
    "wrong",
    [
        {"low": 0.9},
        {"low": 0.0},
        {"target": 0.95},
        {"growth": 1.0},
        {"cut": 1.0},
        {"cut": 0.0},
        {"poll_s": 0},
    ],
)
def test_what_cannot_work_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"use (0 < low|growth > 1)"):
        AdditiveIncrease(**wrong)
