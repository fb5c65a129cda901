"""Orders and admissions that look at predictions and at KV, one promise each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.core_builders import Stage, engine_of, step_of, trajectory_spec

from heddle_dask.core.commands import AdmitTrajectory, Command, StartStep
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.events import StepFinished
from heddle_dask.core.ids import EngineId, StepId, TrajectoryId
from heddle_dask.core.prediction import Prediction
from heddle_dask.core.priority import NORMAL, Priority
from heddle_dask.core.state import State
from heddle_dask.core.view import ClusterView
from heddle_dask.cost.engine_cost import fixed_cost
from heddle_dask.strategies.admission.kv_watermark import KvWatermark
from heddle_dask.strategies.placement.cache_aware import CacheAware
from heddle_dask.strategies.scheduling.group_first import GroupFirst
from heddle_dask.strategies.scheduling.least_attained import LeastAttained
from heddle_dask.strategies.scheduling.longest_first import LongestFirst

VIEW = ClusterView(State())


def record(name: str = "a", *, group: str = "", generated: int = 0, number: int = 1) -> Trajectory:
    made = Trajectory(trajectory_spec(name, group=group), number)
    made.generated_tokens = made.predicted_at_tokens = generated
    return made


def predicted(median: float, q90: float, *, generated: int = 0) -> Trajectory:
    made = record(generated=generated)
    made.prediction = Prediction(median, q90)
    return made


# -- longest first ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "quantile", "priority"),
    [
        ("remaining", "median", 100.0),
        ("remaining", "q90", 300.0),
        ("total", "median", 150.0),
        ("total", "q90", 350.0),
    ],
)
def test_longest_first_goes_by_what_it_is_told_to(of: str, quantile: str, priority: float) -> None:
    rule = LongestFirst(of, quantile)  # type: ignore[arg-type]
    assert rule.priority(VIEW, predicted(100, 300, generated=50), step_of("a"), order=7) == Priority(
        0, priority
    )


@pytest.mark.parametrize(
    ("of", "tools", "priority"),
    [
        ("remaining", True, 700.0),
        ("total", True, 950.0),
        ("remaining", False, 300.0),
        ("total", False, 350.0),
    ],
)
def test_longest_first_counts_tools_by_the_tokens_that_a_busy_engine_makes(
    of: str, tools: bool, priority: float
) -> None:
    rule = LongestFirst(of, tools=tools)  # type: ignore[arg-type]
    rule.use_costs({2: fixed_cost(9.0), 1: fixed_cost(0.02)})
    record = predicted(100, 300, generated=50)
    record.prediction = Prediction(100, 300, tools_s=8.0)
    record.predicted_at_tools_s = 4.0
    record.tools_s = 11.0  # some of them ran since, as a late prediction finds
    assert rule.priority(VIEW, record, step_of("a"), order=7).tokens == pytest.approx(priority)


def test_longest_first_without_a_prediction_leaves_it_to_the_order_of_arrival() -> None:
    stage = Stage(overrides=["scheduling=longest-first"])
    stage.submit("a", "b")
    for name in "ba":
        stage.request(name)
    first, second = stage.join("E1")
    assert isinstance(first, StartStep) and isinstance(second, StartStep)
    assert (first.step_id.trajectory_id, first.priority, second.priority) == ("b", NORMAL, NORMAL)
    assert first.order < second.order


def test_longest_first_looks_anew_at_every_step() -> None:
    stage = Stage(overrides=["scheduling=longest-first,of=remaining", "predictor=oracle"])
    stage.join("E1")
    stage.submit("a")
    stage.predict("a", 900, q90=1000)
    first = stage.generating("a")
    assert first.priority.tokens == 1000
    stage.finish(first, new_tokens=400)
    stage.predict("a", 500, q90=550)
    assert stage.placed("a", 1).priority.tokens == 550


def test_a_prediction_that_is_late_does_not_count_tokens_twice() -> None:
    """The next step is asked for before the predictor has seen the last one."""
    stage = Stage(overrides=["scheduling=longest-first,of=total", "predictor=oracle"])
    stage.join("E1")
    stage.submit("a")
    stage.predict("a", 1000)
    stage.finish(stage.generating("a"), new_tokens=400)
    second = stage.generating("a", 1)
    assert second.priority.tokens == 1000, "400 of the 1000 are done, not 400 on top"
    stage.predict("a", 600)  # while the step runs: kept for the next
    assert stage.trajectory("a").prediction == Prediction(600, 600)
    stage.finish(second, new_tokens=100)
    assert stage.placed("a", 2).priority.tokens == 1000


def test_predictions_about_a_step_that_is_over_are_late() -> None:
    stage = Stage(overrides=["predictor=oracle"])
    stage.join("E1")
    stage.submit("a")
    stage.finish(stage.generating("a"))
    before = stage.state.stale_events
    assert stage.predict("a", 900, steps=0) == []
    assert (stage.state.stale_events, stage.trajectory("a").prediction) == (before + 1, None)


# -- least attained --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("served", "level"), [(0, 0), (99, 0), (100, 1), (299, 1), (300, 2), (699, 2), (700, 3), (100_000, 9)]
)
def test_least_attained_has_levels_each_twice_as_wide(served: int, level: int) -> None:
    rule = LeastAttained(quantum_tokens=100)
    assert rule.priority(VIEW, record(generated=served), step_of("a"), order=1) == Priority(-level)


def test_least_attained_within_a_level_is_first_come() -> None:
    stage = Stage("autellix")
    stage.join("E1")
    stage.submit("a", "b")
    stage.finish(stage.generating("a"), new_tokens=100)
    second, first = stage.placed("a", 1), stage.placed("b")
    assert second.priority == first.priority == NORMAL
    assert second.order < first.order
    stage.finish(second, new_tokens=600)
    assert stage.placed("a", 2).priority == Priority(-1)


# -- group first -----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.floats(0, 1e9)), min_size=2, max_size=8),
)
def test_group_first_goes_by_the_group_and_then_by_length(rows: list[tuple[int, float]]) -> None:
    state = State()
    view, rule = ClusterView(state), GroupFirst()
    ranks = []
    for number, (lacking, ahead) in enumerate(rows):
        name = f"g{number}"
        state.unfinished_by_group[trajectory_spec("x", group=name).group_id] = lacking
        one = record(f"t{number}", group=name)
        one.prediction = Prediction(ahead, ahead)
        ranks.append((rule.priority(view, one, step_of("x"), number), lacking, ahead))
    for priority, lacking, ahead in ranks:
        for other, other_lacking, other_ahead in ranks:
            if (-lacking, ahead) > (-other_lacking, other_ahead):
                assert priority > other


def test_group_first_prefers_the_group_that_lacks_one() -> None:
    stage = Stage(overrides=["scheduling=group-first", "predictor=oracle"])
    stage.join("E1")
    stage.submit("a1", "a2", "a3", group="a")
    stage.submit("b1", "b2", group="b")
    stage.predict("a1", 9000)
    stage.predict("b1", 10)
    assert stage.placed("b1").priority > stage.placed("a1").priority
    stage.end("a2")
    stage.end("a3")
    assert stage.placed("b2").priority.level < -1
    assert stage.state.unfinished_by_group == {"a": 1, "b": 2}


# -- admission by KV pressure ----------------------------------------------------------------------------

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
    made = record()
    made.kept_on, made.kept_tokens, made.policy_version = EngineId("E1"), 4000, 2
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


# -- cache-aware placement -------------------------------------------------------------------------------


def loaded(*steps: int) -> list[Engine]:
    engines = []
    for number, count in enumerate(steps, start=1):
        engine = Engine(engine_of(f"E{number}"), number)
        engine.inflight = {TrajectoryId(f"x{number}-{i}"): None for i in range(count)}
        engines.append(engine)
    return engines


def at_home(name: str, home: str | None, group: str = "g") -> Trajectory:
    made = record(name, group=group)
    made.home = None if home is None else EngineId(home)
    return made


@pytest.mark.parametrize(
    ("steps", "chosen"),
    [
        ((32, 0), "E1"),  # a spread of 32 is not more than 32
        ((33, 0), "E2"),
        ((66, 33), "E1"),  # 33 more, but not more than twice as many
        ((67, 33), "E2"),
        ((33, 5, 0), "E3"),
    ],
)
def test_cache_aware_leaves_home_only_under_skew(steps: tuple[int, ...], chosen: str) -> None:
    rule = CacheAware(skew_steps=32, skew_ratio=2.0)
    assert rule.choose_engine(at_home("a", "E1"), step_of("a"), loaded(*steps)).engine_id == chosen


def test_cache_aware_brings_a_group_together_and_otherwise_takes_the_emptiest_cache() -> None:
    rule, engines = CacheAware(), loaded(0, 0, 0)
    engines[0].resident_tokens, engines[1].resident_tokens = 500, 400
    assert rule.choose_engine(at_home("a1", None), step_of("a"), engines).engine_id == "E3"
    engines[2].resident_tokens = 900
    assert rule.choose_engine(at_home("a2", None), step_of("a"), engines).engine_id == "E3", (
        "its prompt is there"
    )
    assert rule.choose_engine(at_home("b1", None, "h"), step_of("b"), engines).engine_id == "E2"


def test_cache_aware_brings_a_group_together_again_after_its_engine_was_lost() -> None:
    rule, engines = CacheAware(), loaded(0, 0, 0)
    rule.choose_engine(at_home("a1", None), step_of("a"), engines)
    left = engines[1:]
    assert rule.choose_engine(at_home("a1", None), step_of("a"), left).engine_id == "E2"
    left[0].resident_tokens = 500
    assert rule.choose_engine(at_home("a2", None), step_of("a"), left).engine_id == "E2"


def test_verl_hybrid_is_cache_aware_with_a_skew_of_32() -> None:
    stage = Stage("verl-hybrid")
    assert stage.controller.strategies.placement == CacheAware(skew_steps=32, skew_ratio=1.0)
