"""Admission by the contexts that trajectories will reach: what it learns, and what it never does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.core_builders import Stage

from heddle_dask.core.commands import AdmitTrajectory, Command
from heddle_dask.core.entities import Trajectory
from heddle_dask.strategies.admission.kv_forecast import KvForecast
from heddle_dask.strategies.presets import build_strategies


def admitted(commands: list[Command]) -> list[str]:
    return [c.trajectory_id for c in commands if isinstance(c, AdmitTrajectory)]


def names(count: int, prefix: str = "t") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def forecasting(kv_tokens: int, *, engines: int = 1, slots: int = 64, options: str = "") -> Stage:
    stage = Stage(overrides=[f"admission=kv-forecast{options}"])
    for number in range(engines):
        stage.join(f"E{number}", slots=slots, kv_tokens=kv_tokens)
    return stage


def live(stage: Stage) -> list[Trajectory]:
    waiting = stage.state.unadmitted
    return [t for name, t in stage.state.trajectories.items() if name not in waiting]


def play(stage: Stage, name: str, contexts: list[int]) -> None:
    """A trajectory takes a step with each of these contexts, and ends."""
    for index, context in enumerate(contexts):
        stage.finish(stage.generating(name, index, context=context))
    stage.end(name)


def test_before_anything_is_known_contexts_may_become_long() -> None:
    """Prompts of 100 tokens, and contexts of up to 4,096: all 100 prompts would fit, all contexts would not."""
    stage = forecasting(12_000)
    count = len(admitted(stage.submit(*names(100), prompt_tokens=100)))
    assert 12_000 / 4096 < count < 60


def test_short_trajectories_let_more_live() -> None:
    stage = forecasting(12_000)
    stage.submit(*names(100), prompt_tokens=100)
    before = stage.state.alive
    for number in range(30):
        play(stage, f"t{number}", [100, 150])
    assert stage.state.alive > 1.5 * before


def test_long_trajectories_let_fewer_live_although_the_memory_is_empty_now() -> None:
    """Those that live have just begun, and hold 100 tokens each."""
    short, long = forecasting(12_000), forecasting(12_000)
    for stage, last in ((short, 150), (long, 3900)):
        stage.submit(*names(900), prompt_tokens=100)
        for number in range(30):
            play(stage, f"t{number}", [100, last])
        assert stage.engine("E0").resident_tokens == 0
    assert long.state.alive < short.state.alive / 4
    assert long.state.alive >= 12_000 // 4096


def test_the_prior_says_how_many_start_before_any_has_ended() -> None:
    """With a large one no context ends before it is full: about as many start as full contexts fit."""

    def first_fill(prior: float) -> int:
        return len(admitted(forecasting(12_000, options=f",prior={prior}").submit(*names(100), prompt_tokens=100)))

    assert first_fill(100.0) <= 12_000 // 4096 + 1 < first_fill(0.5) < first_fill(0.2)


def test_every_engine_has_one_at_least() -> None:
    stage = forecasting(1_000, engines=3)
    assert len(admitted(stage.submit(*names(9), prompt_tokens=900))) == 3


def test_an_engine_that_joins_adds_its_memory() -> None:
    stage = Stage(overrides=["admission=kv-forecast"])
    assert admitted(stage.submit(*names(100), prompt_tokens=100)) == [], "no engine, no memory"
    first = len(admitted(stage.join("E0", kv_tokens=12_000)))
    assert first > 0
    assert len(admitted(stage.join("E1", kv_tokens=24_000))) > first


def test_short_steps_let_more_start_before_any_has_ended() -> None:
    def alive_after(growth: int) -> int:
        stage = forecasting(12_000)
        stage.submit(*names(100), prompt_tokens=100)
        for name in [t.trajectory_id for t in live(stage)][:20]:
            for index in range(8):
                stage.finish(stage.generating(name, index, context=100 + index * growth))
        return stage.state.alive

    assert alive_after(1) > alive_after(100)


def test_the_sticky_router_sends_it_to_the_engine_with_its_reservation() -> None:
    """The last one goes to the engine with more tokens now, and more memory for what will be."""
    stage = forecasting(12_000)
    stage.join("E1", slots=64, kv_tokens=120_000)
    stage.submit(*names(3), prompt_tokens=100)
    chosen = {t.trajectory_id: t.reserved_on for t in live(stage)}
    assert list(chosen.values()) == ["E1", "E1", "E1"]
    for name, engine in chosen.items():
        assert stage.placed(name, context=100).engine_id == engine


@pytest.mark.parametrize("known", [[0], [0, 10_000]])
def test_engines_that_do_not_report_their_memory_bound_nothing(known: list[int]) -> None:
    stage = Stage(overrides=["admission=kv-forecast"])
    for number, kv_tokens in enumerate(known):
        stage.join(f"E{number}", kv_tokens=kv_tokens)
    assert len(admitted(stage.submit(*names(50)))) == 50


def test_ample_memory_bounds_nothing() -> None:
    stage = forecasting(10_000_000)
    assert len(admitted(stage.submit(*names(50), prompt_tokens=100))) == 50


def test_the_oldest_goes_first() -> None:
    stage = forecasting(8_000)
    order = admitted(stage.submit(*names(40), prompt_tokens=100))
    for name in list(order):
        stage.finish(stage.generating(name, context=100))
        order += admitted(stage.end(name))
    assert order == names(len(order))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.lists(st.integers(1, 1200), min_size=1, max_size=3),
        min_size=1,
        max_size=30,
    ),
    st.integers(3_000, 60_000),
    st.integers(1, 3),
)
def test_every_trajectory_starts_and_ends_whatever_the_lengths(
    growths: list[list[int]], kv_tokens: int, engines: int
) -> None:
    """In the order of submission, with an engine's worth of trajectories alive at least while any waits."""
    stage = forecasting(kv_tokens, engines=engines)
    stage.submit(*names(len(growths)), prompt_tokens=100)
    started = 0
    while stage.state.trajectories:
        alive = live(stage)
        assert len(alive) >= min(engines, len(stage.state.trajectories))
        started = max(started, *(int(t.trajectory_id[1:]) + 1 for t in alive))
        assert len(stage.state.unadmitted) == len(growths) - started
        name = alive[0].trajectory_id
        context = 100
        for index, growth in enumerate(growths[int(name[1:])]):
            stage.finish(stage.generating(name, index, context=context))
            context += growth
        stage.end(name)
    assert started == len(growths)


@pytest.mark.parametrize("wrong", [{"fill": 0.0}, {"prior": 0.0}, {"doubt": -1.0}, {"spread": -0.1}])
def test_it_refuses_what_cannot_work(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="use fill and prior above 0"):
        KvForecast(**wrong)


@pytest.mark.parametrize(("prompt", "first"), [(3_000, "a/1"), (30, "b/1")])
def test_where_prompts_are_long_the_oldest_goes_that_finds_its_prompt_on_the_engine(prompt: int, first: str) -> None:
    """Each engine has memory for one. Group a began on one engine and b on the other; b waits for longer."""
    stage = forecasting(int(1.2 * prompt), engines=2, options=",fill=0.95,prior=1.0,doubt=0.5")
    for name in ("a/0", "b/0", "b/1"):
        stage.submit(name, group=name[0])
    stage.submit("c/0", prompt_tokens=4_000)  # on no engine, and too long for either
    stage.submit("a/1", group="a")
    assert {t.trajectory_id for t in live(stage)} == {"a/0", "b/0"}
    stage.finish(stage.generating("b/0", 0, context=prompt))
    play(stage, "a/0", [prompt, prompt + 400])
    assert {t.trajectory_id for t in live(stage)} - {"a/0"} == {"b/0", first}


def test_what_lost_its_engine_comes_back_before_another_starts() -> None:
    """Each engine has memory for one; the one that was lost had a trajectory whose tool runs."""
    stage = forecasting(3_000, engines=2)
    stage.submit("a", "b", "c", prompt_tokens=2_000)
    for name in ("a", "b"):
        stage.finish(stage.generating(name, context=2_000))
    lost, stays = stage.trajectory("a"), stage.trajectory("b")
    assert lost.home is not None
    stage.lose(lost.home)
    assert lost.is_homeless and not stays.is_homeless
    assert admitted(stage.end("b")) == []
    assert admitted(stage.end("a")) == ["c"]


def test_the_share_of_kv_fit_bounds_what_it_admits_without_a_predictor() -> None:
    """Each has a context of 1,000 tokens that does not grow, in 12,000."""

    def most(fill: float) -> int:
        overrides = ["predictor=none", f"admission=kv-fit,fill={fill}"]
        stage = Stage(strategies=build_strategies("heddle", overrides=overrides))
        stage.join("E", slots=64, kv_tokens=12_000, max_context_tokens=1_000)
        return len(admitted(stage.submit(*names(40), prompt_tokens=1_000)))

    assert (most(0.5), most(0.95)) == (6, 11)
