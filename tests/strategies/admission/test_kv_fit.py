"""Admission by KV memory and placement where room is: the longest that fits starts next, wherever that is."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from worlds.core_builders import Stage, engine_of, host_of, step_of, trajectory_spec

from benchmarks.deadline import DEADLINE
from heddle_dask.core import events as ev
from heddle_dask.core.commands import AdmitTrajectory, Command, StartStep
from heddle_dask.core.entities import Trajectory
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import EngineId, GroupId, StepId, TrajectoryId
from heddle_dask.core.nouns import Prediction
from heddle_dask.cost.memory_profile import MemoryProfile
from heddle_dask.strategies.admission.kv_fit import KvFit
from heddle_dask.strategies.admission.wait_queue import WaitQueue
from heddle_dask.strategies.engine_costs import EngineCosts
from heddle_dask.strategies.presets import build_strategies
from heddle_dask.strategies.remaining import RemainingDemand, demand_of, remaining_lengths, tools_left


def stage_of(*overrides: str, predictor: str = "oracle") -> Stage:
    """By memory alone: what an engine can do in time is in `test_deadline`."""
    parts = [
        "admission=kv-fit,fill=1.0",
        "placement=sticky-least-loaded",
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
        out += admitted(stage.feed(ev.PredictionMade, name, 0, Prediction(tokens, tokens)))
    return out


def place(stage: Stage, name: str, context: int, index: int = 0) -> str:
    (start,) = [
        c for c in stage.feed(ev.StepRequested, step_of(name, index, context=context)) if isinstance(c, StartStep)
    ]
    return str(start.engine_id)


def test_nobody_is_admitted_before_it_is_predicted() -> None:
    stage = stage_of()
    stage.feed(ev.EngineJoined, engine_of("A", kv_tokens=1000))
    assert admitted(stage.feed(ev.TrajectorySubmitted, trajectory_spec("a", 10))) == []
    assert admitted(stage.feed(ev.PredictionMade, "a", 0, Prediction(50.0, 60.0))) == ["a"]


def test_without_a_predictor_it_admits_as_kv_forecast_does() -> None:
    def alive(admission: str, last: int) -> int:
        stage = Stage("heddle", overrides=["predictor=none", f"admission={admission}"])
        stage.join("A", slots=64, kv_tokens=12_000)
        names = [f"t{number}" for number in range(400)]
        stage.submit(*names, prompt_tokens=100)
        for name in names[:30]:
            for index, context in enumerate((100, last)):
                stage.finish(stage.generating(name, index, context=context))
            stage.end(name)
        return stage.state.alive

    short, long = alive("kv-fit", 150), alive("kv-fit", 3_900)
    assert short > 4 * long > 0
    same = "kv-forecast,fill=0.95"
    assert (short, long) == (alive(same, 150), alive(same, 3_900))


@pytest.mark.parametrize("admission", ["kv-fit", DEADLINE], ids=["kv-fit", "deadline"])
def test_a_model_that_has_learnt_from_few_admits_nobody(admission: str) -> None:
    def alive(learnt_from: int, admission: str = admission) -> set[str]:
        stage = Stage("heddle", overrides=[f"admission={admission},fill=0.9"])
        stage.join("A", slots=64, kv_tokens=12_000)
        names = [f"t{number}" for number in range(100)]
        stage.submit(*names, prompt_tokens=100)
        for name in names:
            stage.predict(name, 10.0, learnt_from=learnt_from)
        return {name for name in names if stage.trajectory(name).home or name not in stage.state.unadmitted}

    forecast = alive(0, "kv-forecast")
    assert alive(0) == forecast and 2 < len(forecast) < 50
    assert len(alive(3)) <= len(forecast) + 3
    assert len(alive(100)) > 2 * len(forecast), "by the predicted lengths nearly all fit"


def test_predicted_lengths_count_when_more_were_learnt_from_than_are_alive() -> None:
    stage = stage_of()
    stage.join("A", slots=64, kv_tokens=1500)
    stage.submit("a", "b", "c", "d", "e", prompt_tokens=100)
    for name in "abcde":
        stage.predict(name, 1.0, learnt_from=0)
    waiting = [str(name) for name in stage.state.unadmitted]
    assert stage.state.alive and len(waiting) >= 2
    for name in waiting[:-1]:
        assert not admitted(stage.predict(name, 1.0, learnt_from=50)), "one of them is still unknown"
    assert not admitted(stage.predict(waiting[-1], 1.0, learnt_from=stage.state.alive))
    assert sorted(admitted(stage.predict(waiting[-1], 1.0, learnt_from=50))) == waiting


def test_the_longest_that_waits_starts_when_there_is_room_for_it() -> None:
    stage = stage_of()
    stage.feed(ev.EngineJoined, engine_of("A", kv_tokens=1000))
    # The first takes 600 as it will be on average; no other has room beside it.
    assert submit(stage, ("a", 100, 500.0), ("short", 100, 350.0), ("long", 100, 800.0)) == ["a"]
    place(stage, "a", 100)
    assert admitted(stage.feed(ev.TrajectoryEnded, "a", "completed")) == ["long"]


@pytest.mark.parametrize(("observed_per_token", "both"), [(0.0, True), (2.0, True), (5.0, False)])
def test_what_tools_added_earlier_counts_before_any_has_run(observed_per_token: float, both: bool) -> None:
    stage = stage_of()
    stage.feed(ev.EngineJoined, engine_of("A", kv_tokens=1000))
    for name in "ab":
        stage.feed(ev.TrajectorySubmitted, trajectory_spec(name, 10))
    # At their ends both hold 10 + 100 * (1 + observed) tokens.
    told = [
        stage.feed(ev.PredictionMade, n, 0, Prediction(100.0, 100.0, observation_per_token=observed_per_token))
        for n in "ab"
    ]
    assert [admitted(commands) for commands in told] == [["a"], ["b"] if both else []]


def test_room_is_counted_by_engine_and_not_in_all() -> None:
    stage = stage_of()
    for name in "AB":
        stage.feed(ev.EngineJoined, engine_of(name, kv_tokens=1000))
    # A token brings two more, as long as nothing else is known: each will hold 900 at its end.
    assert submit(stage, ("a", 300, 200.0), ("b", 300, 200.0), ("c", 200, 100.0)) == ["a", "b"]
    assert {place(stage, "a", 300), place(stage, "b", 300)} == {"A", "B"}
    assert admitted(stage.feed(ev.PredictionMade, "b", 0, Prediction(200.0, 200.0))) == []
    assert admitted(stage.feed(ev.TrajectoryEnded, "a", "completed")) == ["c"]


def test_the_short_one_starts_in_memory_that_the_long_one_does_not_need_yet() -> None:
    stage = stage_of("admission=kv-fit,fill=1.0,critical=0")
    stage.feed(ev.EngineJoined, engine_of("A", kv_tokens=1000))
    # The first will hold 910 at its end. Until the other ends, 50 tokens from now, both hold 160 each.
    rows = [("a", 10, 300.0), ("late", 10, 200.0), ("soon", 10, 50.0)]
    assert submit(stage, *rows) == ["a", "soon"]


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
    stage.feed(ev.StepStarted, StepId(TrajectoryId("t0"), 0, 0), "A")
    assert admitted(stage.feed(ev.StepFinished, StepId(TrajectoryId("t0"), 0, 0), "A", 5, 0, "stop")) == ["t3"], (
        "t0 is in a tool now"
    )


LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=4).map(sorted)
STRETCHES = st.sampled_from([1.0, 2.0, 4.0])
GROWTHS = st.sampled_from([0.0, 0.5, 1.0, 3.0])


@given(
    st.lists(st.tuples(st.integers(0, 300), LENGTHS, STRETCHES, GROWTHS), max_size=8),
    st.tuples(st.integers(0, 300), st.integers(0, 300), STRETCHES, GROWTHS),
    st.sampled_from([0.0, 1.0, 2.5]),
    st.integers(1, 2000),
)
def test_a_profile_is_what_is_held_at_every_time_and_a_margin(
    there: list[tuple[int, list[int], float, float]],
    more: tuple[int, int, float, float],
    margin: float,
    capacity: int,
) -> None:
    context, left, stretch, growth = more
    stretched = [(c, [length * times for length in lengths], g / times) for c, lengths, times, g in there]
    end = left * stretch

    def held_at(t: float, just_before: bool) -> float:
        """Mean and margin of the residents, one by one, and the new trajectory."""
        mean = variance = 0.0
        for c, lengths, grows in stretched:
            alive = sum(length > t or (just_before and length == t) for length in lengths) / len(lengths)
            mean += alive * (c + grows * t)
            variance += alive * (1 - alive) * (c + grows * t) ** 2
        return mean + margin * math.sqrt(variance) + context + growth * t / stretch

    # Usage rises between two ends: checking just before each end, and at the end of the new trajectory, is enough.
    times = sorted({t for _, lengths, _ in stretched for t in lengths if t <= end})
    needs = [*[held_at(t, True) for t in times], held_at(end, False)]
    assume(all(abs(need - capacity) > 1e-6 for need in needs) or not margin)
    rows = [(float(c), [float(length) for length in lengths], times, g) for c, lengths, times, g in there]
    profile = MemoryProfile(capacity, rows, margin)
    assert profile.fits(context, left, stretch, growth) == all(need <= capacity + 1e-9 for need in needs)
    profile.add(context, [left], stretch, growth)
    again = MemoryProfile(capacity, [*rows, (float(context), [float(left)], stretch, growth)], margin)
    for c, r in ((0, 10), (50, 50), (200, 290)):
        assert profile.fits(c, r) == again.fits(c, r)


@given(st.floats(1.0, 1e5), st.floats(1.0, 8.0), st.integers(1, 6), st.integers(0, 10**6))
@example(1.0, 1.0000000000000002, 3, 0)
def test_likely_lengths_have_the_mean_of_the_law_and_those_outlived_are_gone(
    median: float, ratio: float, count: int, done: int
) -> None:
    stage = stage_of()
    stage.feed(ev.TrajectorySubmitted, trajectory_spec("t", 10))
    stage.feed(ev.PredictionMade, "t", 0, Prediction(median, median * ratio))
    trajectory = stage.trajectory("t")
    trajectory.generated_tokens = trajectory.predicted_at_tokens
    mean, fresh = remaining_lengths(trajectory, count)
    assert list(fresh) == sorted(fresh)
    spread = math.log(ratio) / NormalDist().inv_cdf(0.9)
    if ratio > 1 and count > 1:
        assert len(fresh) == count
        assert sum(fresh) / count == pytest.approx(median * math.exp(spread**2 / 2), rel=1e-6)
    trajectory.generated_tokens += done
    mean_later, later = remaining_lengths(trajectory, count)
    assert mean_later == max(0.0, mean - done)
    assert later == pytest.approx([max(0.0, left - done) for left in fresh if left > done] or [0.0])


def test_many_of_unknown_length_do_not_all_hold_at_once_what_each_holds_at_its_mean() -> None:
    def alive_with(options: str) -> int:
        stage = stage_of(f"admission=kv-fit,fill=1.0,per_slot=100,{options}")
        stage.feed(ev.EngineJoined, engine_of("A", kv_tokens=3000))
        alive: list[str] = []
        for number in range(60):
            alive += admitted(stage.feed(ev.TrajectorySubmitted, trajectory_spec(f"t{number}", 10)))
            alive += admitted(stage.feed(ev.PredictionMade, f"t{number}", 0, Prediction(60.0, 230.0)))
        return len(alive)

    # By default tools add two tokens for each generated one.
    grown = 3 * 60 * math.exp((math.log(230 / 60) / NormalDist().inv_cdf(0.9)) ** 2 / 2)
    at_the_mean = alive_with("lengths=1,margin=0")
    assert at_the_mean == int(3000 / (10 + grown))
    assert at_the_mean < alive_with("lengths=4,margin=1") < alive_with("lengths=4,margin=0") < 60


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=8),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.lists(st.integers(1, 2000), min_size=2, max_size=4),
)
def test_a_profile_whose_capacity_changes_is_one_made_with_it(
    there: list[tuple[int, int]], growth: float, capacities: list[int]
) -> None:
    rows = [(float(c), [float(r)], 1.0, growth) for c, r in there]
    profile = MemoryProfile(capacities[0], rows)
    for capacity in capacities[1:]:
        profile.set_capacity(capacity)
        again = MemoryProfile(capacity, rows)
        for c, r in ((0, 10), (50, 50), (200, 290), (1000, 100)):
            assert profile.fits(c, r) == again.fits(c, r)
    profile.add(50.0, [50.0])
    again = MemoryProfile(capacities[-1], [*rows, (50.0, [50.0], 1.0, 1.0)])
    assert profile.fits(10, 60) == again.fits(10, 60)


def told(stage: Stage, name: str, tokens: float, tools_s: float, q90: float | None = None) -> list[str]:
    """Submitted and predicted, with seconds of tools ahead."""
    stage.feed(ev.TrajectorySubmitted, trajectory_spec(name, 10))
    high = tokens if q90 is None else q90
    return admitted(stage.feed(ev.PredictionMade, name, 0, Prediction(tokens, high, "", tools_s, None, 0.0)))


@pytest.mark.parametrize(("option", "then"), [("", "tools"), (",tools=False", "tokens")])
def test_who_waits_for_tools_is_as_long_as_the_tokens_that_others_make_meanwhile(option: str, then: str) -> None:
    stage = stage_of(f"admission=kv-fit,fill=1.0,per_slot=1{option}")
    stage.feed(ev.EngineJoined, engine_of("A", slots=1, kv_tokens=10_000))
    assert told(stage, "first", 100, 0.0) == ["first"]
    pace_s = EngineCosts("tiny-cpu").pace_s
    assert told(stage, "tokens", 300, 0.0) == told(stage, "tools", 50, 400 * pace_s) == []
    assert admitted(stage.feed(ev.TrajectoryEnded, "first", "completed")) == [then]


def test_who_waits_for_tools_keeps_its_memory_meanwhile() -> None:
    """300 tokens of tools behind a context of 500: another one that stays for 200 finds the room taken, not freed."""
    pace_s = EngineCosts("tiny-cpu").pace_s
    alive = {}
    for tools in (True, False):
        stage = stage_of(f"admission=kv-fit,fill=1.0,per_slot=100,least_share=1,critical=0,tools={tools}")
        stage.feed(ev.EngineJoined, engine_of("A", slots=8, kv_tokens=700))
        stage.feed(ev.TrajectorySubmitted, trajectory_spec("a", 500))
        stage.feed(ev.PredictionMade, "a", 0, Prediction(10.0, 20.0, "", 300 * pace_s, None, 0.0))
        alive[tools] = told(stage, "b", 195, 0.0, 196)
    assert alive == {True: [], False: ["b"]}


def test_what_of_the_tools_has_run_is_no_longer_ahead() -> None:
    stage = stage_of()
    told(stage, "a", 100, 8.0)
    trajectory = stage.trajectory("a")
    assert tools_left(trajectory, pace_s=0.1) == pytest.approx(80.0)
    assert demand_of(trajectory, 4, 0.1) == RemainingDemand(100.0, (100.0,), pytest.approx(1.8), 10.0, 1.0, 8.0)
    trajectory.take_action("test", 6.0, True, 6.0)
    assert tools_left(trajectory, pace_s=0.1) == pytest.approx(20.0)
    trajectory.take_action("test", 6.0, True, 12.0)
    assert (
        demand_of(trajectory, 4, 0.1) == demand_of(trajectory, 4, None) == RemainingDemand(100.0, (100.0,), 1.0, 10.0)
    )


@given(st.floats(1.0, 1e5), st.floats(1.0, 8.0), st.integers(1, 6), st.floats(11.0, 1e5))
def test_no_length_exceeds_the_longest_context(median: float, ratio: float, count: int, most: float) -> None:
    stage = stage_of()
    told(stage, "a", median, 0.0, median * ratio)
    trajectory = stage.trajectory("a")
    free, bounded = demand_of(trajectory, count, 0.1), demand_of(trajectory, count, 0.1, most_tokens=most)
    room = most - bounded.context_tokens
    assert bounded.lengths == tuple(min(length, room) for length in free.lengths)
    assert bounded.tokens <= min(free.tokens, room)
    if free.lengths[-1] <= room:
        assert bounded == free


@pytest.mark.parametrize(("least_share", "beside"), [(0, 0), (0.5, 3)])
@pytest.mark.parametrize("q90", [1000.0, 1001.0])
def test_an_engine_is_emptied_for_a_long_trajectory_down_to_the_least_share(
    least_share: float, beside: int, q90: float
) -> None:
    stage = stage_of(f"admission=kv-fit,fill=1.0,per_slot=1,margin=0,least_share={least_share}")
    stage.feed(ev.EngineJoined, engine_of("A", slots=8, kv_tokens=100_000))
    assert told(stage, "long", 1000, 1.0, q90) == ["long"]
    alive = [name for number in range(6) for name in told(stage, f"t{number}", 10, 0.0)]
    assert len(alive) == beside


def test_a_newcomer_starts_where_those_before_it_did_not_fit() -> None:
    stage = stage_of()
    for name, kv in (("A", 1000), ("B", 1300)):
        stage.feed(ev.EngineJoined, engine_of(name, kv_tokens=kv))
    # Those that live there will hold 910 at their ends, so that the long one fits nowhere. 50 tokens from now A holds
    # 160 and the wide one 750; for the wider one only B has room beside its first.
    rows = [
        ("a", 10, 300.0),
        ("b", 10, 300.0),
        ("long", 10, 290.0),
        ("wide", 600, 50.0),
        ("wider", 700, 40.0),
    ]
    for name, prompt, _ in rows:
        stage.feed(ev.TrajectorySubmitted, trajectory_spec(name, prompt))
    told = [stage.feed(ev.PredictionMade, name, 0, Prediction(left, left)) for name, _, left in rows]
    assert [admitted(commands) for commands in told] == [["a"], ["b"], [], ["wide"], ["wider"]]
    placed = {name: place(stage, name, prompt) for name, prompt, _ in rows if name != "long"}
    assert placed == {"a": "A", "b": "B", "wide": "A", "wider": "B"}


# While little memory is taken yet, the placement may choose another engine: not one whose memory others were promised.
@example([(1, 1), (1, 1), (1, 2), (2, 1), (1, 3), (85, 3), (400, 3), (113, 1), (400, 6)], 3)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=30), st.integers(1, 4))
def test_everybody_is_admitted_in_the_end(rows: list[tuple[int, int]], engines: int) -> None:
    stage = stage_of("admission=kv-fit,fill=1.0,per_slot=100")
    for number in range(engines):
        stage.feed(ev.EngineJoined, engine_of(f"E{number}", kv_tokens=1000))
    waiting = [(f"t{i}", prompt, float(tokens)) for i, (prompt, tokens) in enumerate(rows)]
    alive, ended = submit(stage, *waiting), 0
    prompts = {name: prompt for name, prompt, _ in waiting}
    while alive:
        for name in alive:
            place(stage, name, prompts[name])
        for engine in stage.state.engines.values():
            assert engine.resident_tokens <= 1000, "no trajectory is admitted with a context that does not fit now"
        alive_now, alive = alive, []
        for name in alive_now:
            alive += admitted(stage.feed(ev.TrajectoryEnded, name, "completed"))
            ended += 1
    assert ended == len(rows)


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 3), st.booleans(), st.sampled_from([None, 0, 3, 20])),
        max_size=30,
    )
)
def test_a_line_gives_the_longest_whatever_happened(rows: list[tuple[int, int, bool, int | None]]) -> None:
    line = WaitQueue()
    kept: dict[str, tuple[int, int, str]] = {}
    learnt: list[float] = []
    for number, (left, group, leaves, learnt_from) in enumerate(rows):
        record = Trajectory(trajectory_spec(f"t{number}", group=f"g{group}"), number)
        line.put(record, left + 100, 0)
        record.take_prediction(Prediction(1.0, 2.0, learnt_from=learnt_from))
        line.put(record, 2 * left, left)  # a newer prediction
        if leaves:
            line.discard(record)
            line.discard(record)
        else:
            kept[record.trajectory_id] = (left, -number, f"g{group}")
            learnt.append(math.inf if learnt_from is None else learnt_from)
    assert line.learnt_from == min(learnt, default=math.inf)
    assert line.tokens == sum(2 * left for left, _, _ in kept.values())
    for limit in (0, 10, 100):
        fitting = {n: k for n, k in kept.items() if k[0] <= limit}

        def fits(record: Trajectory, limit: int = limit) -> bool:
            return kept[record.trajectory_id][0] <= limit

        found = line.longest_where(fits)
        assert (found and found.trajectory_id) == max(fitting, key=lambda n: fitting[n], default=None)
        of_two = {n: k for n, k in fitting.items() if k[2] in ("g0", "g2")}
        found = line.longest_of([GroupId("g0"), GroupId("g2")], fits)
        assert (found and found.trajectory_id) == max(of_two, key=lambda n: of_two[n], default=None)


@pytest.mark.parametrize(
    "wrong", ["fill=0", "per_slot=0", "least_share=2", "quantile=mean"], ids=lambda text: text.split("=")[0]
)
def test_kv_fit_refuses_what_cannot_work(wrong: str) -> None:
    with pytest.raises(BadInput, match="kv-fit"):
        build_strategies("heddle", overrides=[f"admission=kv-fit,{wrong}"])


def test_memory_is_promised_until_who_was_admitted_arrives_or_ends() -> None:
    built = build_strategies("heddle", overrides=["predictor=oracle"])
    assert isinstance(built.admission, KvFit)
    stage = Stage(strategies=built)
    stage.feed(ev.EngineJoined, engine_of("A", kv_tokens=10_000))
    name = EngineId("A")
    assert submit(stage, ("a", 100, 50.0), ("b", 200, 60.0)) == ["a", "b"]
    both = stage.engine(name).reserved_tokens
    assert (stage.trajectory("a").reserved_on, stage.trajectory("b").reserved_on) == (name, name)
    assert both >= 300 + (50 + 60) / 2, "contexts, and half of what they will grow by"
    place(stage, "b", 200)
    assert both - 300 < stage.engine(name).reserved_tokens < both - 200
    place(stage, "a", 100)
    assert stage.engine(name).reserved_tokens == 0
