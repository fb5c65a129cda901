"""Admission with certain lengths: no engine takes more than it can do in time, and the long ones come together."""

from __future__ import annotations

from worlds.core_builders import Stage, engine_of, step_of, trajectory_spec

from benchmarks.deadline import DEADLINE, EXACT
from benchmarks.deadline.admission import Deadline
from heddle_dask.core import events as ev
from heddle_dask.core.commands import AdmitTrajectory, Command, StartStep
from heddle_dask.core.nouns import Prediction
from heddle_dask.core.view import ClusterView
from heddle_dask.cost.engine_cost import load_profile
from heddle_dask.sim.rollout import Arm
from heddle_dask.strategies.presets import build_strategies

Row = tuple[str, float]


def stage_of(engines: str, *overrides: str, kv_tokens: int = 10**7, slots: int = 64) -> Stage:
    exact = Arm.parse(EXACT)
    stage = Stage(strategies=build_strategies(exact.preset, overrides=[*exact.overrides, *overrides]))
    for name in engines:
        stage.feed(ev.EngineJoined, engine_of(name, slots=slots, kv_tokens=kv_tokens, max_context_tokens=10**6))
    return stage


def admitted(commands: list[Command]) -> list[str]:
    return [str(c.trajectory_id) for c in commands if isinstance(c, AdmitTrajectory)]


def submit(stage: Stage, rows: list[Row], spread: float = 1.0) -> list[list[str]]:
    """All are there before the first is predicted; who is admitted at each answer."""
    for name, _ in rows:
        stage.feed(ev.TrajectorySubmitted, trajectory_spec(name, 10))
    told = []
    for name, tokens in rows:
        stage.at -= 1.0  # answers come at once
        told.append(admitted(stage.feed(ev.PredictionMade, name, 0, Prediction(tokens, spread * tokens))))
    return told


def homes(stage: Stage, names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        commands = stage.feed(ev.StepRequested, step_of(name, 0, context=10))
        (start,) = [c for c in commands if isinstance(c, StartStep)]
        found[name] = str(start.engine_id)
    return found


def test_the_first_batch_is_judged_as_a_whole() -> None:
    told = submit(stage_of("A"), [("short", 10.0), ("long", 1000.0), ("middle", 100.0)])
    assert told[:2] == [[], []] and told[2][0] == "long" and sorted(told[2]) == ["long", "middle", "short"]


def test_nobody_waits_for_ever_for_an_answer_to_another() -> None:
    stage = stage_of("A")
    for name in ("a", "silent"):
        stage.feed(ev.TrajectorySubmitted, trajectory_spec(name, 10))
    assert admitted(stage.feed(ev.PredictionMade, "a", 0, Prediction(10.0, 10.0))) == []
    stage.at += 10.0
    assert admitted(stage.feed(ev.PredictionMade, "a", 0, Prediction(10.0, 10.0))) == ["a"]


def test_guesses_are_treated_as_certain_lengths_are() -> None:
    """The strategy does not look at how sure predictions are to decide what it is."""
    told = submit(stage_of("A"), [("a", 10.0), ("b", 20.0)], spread=1.5)
    assert told == [[], ["b", "a"]]


def test_the_long_ones_come_together_and_the_work_is_shared_out() -> None:
    stage = stage_of("ABCD", f"admission={DEADLINE},profile=qwen3-14b-h100")
    rows = [(f"long{i}", 8000.0 - i) for i in range(8)] + [(f"short{i}", 2000.0 - i) for i in range(500)]
    names = [name for told in submit(stage, rows) for name in told]
    placed = homes(stage, names)
    with_long = {placed[name] for name, _ in rows[:8]}
    assert 1 <= len(with_long) <= 2, "not one on each engine"
    cost = load_profile("qwen3-14b-h100")
    tokens = {engine: 0.0 for engine in "ABCD"}
    longest = dict(tokens)
    for name, length in rows:
        if name in placed:
            tokens[placed[name]] += length
            longest[placed[name]] = max(longest[placed[name]], length)
    ends = [cost.fixed_s * longest[e] + (cost.token_s + cost.sequence_s) * tokens[e] for e in "ABCD"]
    spread_out = cost.fixed_s * 8000 + (cost.token_s + cost.sequence_s) * sum(tokens.values()) / 4
    assert max(ends) < 1.1 * spread_out, "no later than with two long ones on each"


def test_all_are_admitted_in_the_end_though_each_would_be_late() -> None:
    """Three equal trajectories on two engines: the engine with two of them is late by the estimate."""
    stage = stage_of("AB", slots=4)
    told = submit(stage, [("a", 1000.0), ("b", 1000.0), ("c", 1000.0)])
    assert sorted(name for names in told for name in names) == ["a", "b", "c"]


def test_hardly_more_than_have_slots_are_alive() -> None:
    """Of those that queue the short ones go last, and would keep memory that was foreseen to be free by then."""
    rows = [(f"t{i:02}", 1000.0 - 10 * i) for i in range(40)]
    certain = [name for told in submit(stage_of("A", slots=20), rows) for name in told]
    by_memory = stage_of("A", "admission=kv-fit", slots=20)
    without = [name for told in submit(by_memory, rows) for name in told]
    assert certain == [f"t{i:02}" for i in range(24)]
    assert len(without) > 24, "by memory alone more of them begin"


def test_memory_is_not_promised_for_want_of_time() -> None:
    # Together they would hold 1,820 at their ends, where 85 in a hundred of 2,000 may be promised.
    stage = stage_of("A", kv_tokens=2000, slots=8)
    for name in ("a", "b"):
        stage.feed(ev.TrajectorySubmitted, trajectory_spec(name, 10))
    told = [stage.feed(ev.PredictionMade, n, 0, Prediction(900.0, 900.0, "", 0.0, 0.0, 0.0)) for n in "ab"]
    assert [admitted(commands) for commands in told] == [[], ["a"]]


def test_what_tools_add_is_known_for_each_where_it_is_certain() -> None:
    # LengthClass in tokens; one reads nine for each, and has no room beside the first.
    stage = stage_of("A", kv_tokens=3000, slots=8)
    for name in ("a", "reader", "writer"):
        stage.feed(ev.TrajectorySubmitted, trajectory_spec(name, 10))
    told = [
        stage.feed(ev.PredictionMade, name, 0, Prediction(tokens, tokens, "", 0.0, observed, 1.0))
        for name, tokens, observed in (("a", 1000.0, 0.0), ("reader", 500.0, 4500.0), ("writer", 499.0, 0.0))
    ]
    assert [admitted(commands) for commands in told] == [[], [], ["a", "writer"]]


def wide_and_narrow(stage: Stage, observed: dict[str, float]) -> list[str]:
    """Of about 50,000 tokens each; what their tools add differs. Told at once; who is admitted first."""
    for name in observed:
        stage.feed(ev.TrajectorySubmitted, trajectory_spec(name, 10))
    told = []
    for number, (name, more) in enumerate(observed.items()):
        stage.at -= 1.0
        tokens = 50_000.0 - number
        told.append(stage.feed(ev.PredictionMade, name, 0, Prediction(tokens, tokens, "", 0.0, more, 1.0)))
    names = [name for commands in told for name in admitted(commands)]
    homes(stage, names)
    return names


def test_nobody_passes_a_critical_one_that_waits_for_memory() -> None:
    rows = {"a": 5e4, "b": 5e4, "wide": 2e5, "narrow": 0.0}
    # 85 in a hundred of 440,000 hold a and b at their ends (200,018), and the wide one (250,008) beside one of them.
    patient = stage_of("A", f"admission={DEADLINE},critical=0.1", kv_tokens=440_000)
    assert wide_and_narrow(patient, rows) == ["a", "b"]
    assert admitted(patient.feed(ev.TrajectoryEnded, "a", "completed")) == ["wide"]
    greedy = stage_of("A", f"admission={DEADLINE},critical=100", kv_tokens=440_000)
    assert wide_and_narrow(greedy, rows) == ["a", "b", "narrow"]
    assert admitted(greedy.feed(ev.TrajectoryEnded, "a", "completed")) == [], "the narrow one holds it up"


def test_nobody_waits_for_one_that_no_engine_can_hold() -> None:
    rows = {"a": 5e4, "b": 5e4, "wide": 9e5, "narrow": 0.0}
    stage = stage_of("A", f"admission={DEADLINE},critical=0.1", kv_tokens=360_000)
    assert wide_and_narrow(stage, rows) == ["a", "b", "narrow"]


def test_who_is_in_time_stays_and_who_is_late_may_go() -> None:
    stage = stage_of("AB")
    admission = stage.controller.strategies.admission
    assert isinstance(admission, Deadline)
    names = [name for told in submit(stage, [("a", 5000.0), ("b", 100.0)]) for name in told]
    placed = homes(stage, names)
    view = ClusterView(stage.state)
    a = stage.trajectory("a")
    other = next(engine.engine_id for engine in view.ready_engines if engine.engine_id != placed["a"])
    assert not admission.may_move(view, a, other), "it will be done in time"
    a.prediction = Prediction(50_000.0, 50_000.0)  # it comes otherwise
    admission._deadline.postpone(view.at + 400.0)
    assert not admission.may_move(view, a, other), "there is no time for it there either"


def test_a_late_engine_gives_to_one_with_time_where_a_longer_one_is() -> None:
    stage = stage_of("AB")
    admission = stage.controller.strategies.admission
    assert isinstance(admission, Deadline)
    names = [name for told in submit(stage, [("a", 5000.0), ("b", 4990.0), ("c", 4980.0)]) for name in told]
    placed = homes(stage, names)
    stage.feed(ev.TrajectorySubmitted, trajectory_spec("waits", 10))
    waits = stage.trajectory("waits")
    waits.prediction = Prediction(10.0, 10.0)
    view = ClusterView(stage.state)
    alone = next(name for name in placed if list(placed.values()).count(placed[name]) == 1)
    goes, grown = (stage.trajectory(name) for name in placed if name != alone)
    there = stage.trajectory(alone)
    assert there.home is not None
    grown.prediction = Prediction(50_000.0, 50_000.0)  # it comes otherwise
    admission._deadline.postpone(view.at + 200.0)
    for tokens, may in ((100.0, False), (6000.0, True)):
        there.prediction = Prediction(tokens, tokens)
        admission.rank(waits)
        for engine in view.ready_engines:  # both are looked at
            admission._backlog(view, engine)
        assert admission.may_move(view, goes, there.home) is may


def test_once_nobody_waits_nobody_stays_with_a_late_engine_beside_idle_ones() -> None:
    stage = stage_of("AB")
    admission = stage.controller.strategies.admission
    assert isinstance(admission, Deadline)
    names = [name for told in submit(stage, [("a", 5000.0), ("b", 4990.0), ("c", 4980.0)]) for name in told]
    placed = homes(stage, names)
    view = ClusterView(stage.state)
    alone = next(name for name in placed if list(placed.values()).count(placed[name]) == 1)
    late = [stage.trajectory(name) for name in placed if name != alone]
    idle = stage.trajectory(alone).home
    assert idle is not None
    stage.at += 1000.0  # long after everything was to be done
    stage.feed(ev.TrajectoryEnded, alone, "completed")
    for one in late:
        one.prediction = Prediction(50_000.0, 50_000.0)  # they come otherwise
    for engine in view.ready_engines:
        admission._backlog(view, engine)
    assert all(admission.may_leave(view, one) and admission.may_move(view, one, idle) for one in late)
    home = late[0].home
    assert home is not None
    stage.engine(idle).residents[late[0].trajectory_id] = None
    del stage.engine(home).residents[late[0].trajectory_id]
    assert not admission.may_move(view, late[1], idle), "that one would be no sooner done than this one"


def test_lengths_that_were_stated_before_any_engine_are_bounded_by_its_context() -> None:
    stage = stage_of("")
    submit(stage, [("long", 100_000.0)])
    admission = stage.controller.strategies.admission
    assert isinstance(admission, Deadline)
    trajectory = stage.trajectory("long")
    assert admission._queued_demand(trajectory).tokens == 100_000.0
    stage.feed(ev.EngineJoined, engine_of("A", slots=1, kv_tokens=10**4, max_context_tokens=4_096))
    assert trajectory.reserved_on == "A"
    assert trajectory.reserved_tokens <= 4_096 * 3
