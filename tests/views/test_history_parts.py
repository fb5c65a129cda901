"""The bounded parts of a history: thinned series, sample of lengths, causes; and what one trajectory's lane shows."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.ids import ActionId, EngineId, GroupId, HostId, StepId, TrajectoryId
from heddle_dask.core.nouns import (
    NORMAL,
    ActionRequest,
    EngineDescription,
    HostDescription,
    Prediction,
    StepRequest,
    TrajectorySpec,
)
from heddle_dask.core.resources import ResourceDemand, Resources
from heddle_dask.views.history.bounded import (
    MOST_CAUSES,
    OTHER,
    FailureTally,
    LengthSample,
    ThinnedSeries,
    cause_in_words,
)
from heddle_dask.views.history.history_pictures import longest_of, trajectory_of
from heddle_dask.views.history.phases import PHASES
from heddle_dask.views.history.run_history import RunHistory
from heddle_dask.views.history.run_snapshot import LengthPair

A = TrajectoryId("a")


@given(gaps=st.lists(st.floats(0.0, 3.0), max_size=300), most=st.integers(2, 20))
def test_a_thinned_series_is_bounded_ordered_and_spread(gaps: list[float], most: int) -> None:
    series: ThinnedSeries[str] = ThinnedSeries(most, 0.1)
    series.add_column("n")
    at, taken = 0.0, 0
    for number, gap in enumerate(gaps):
        at += gap
        if number == 5:
            series.add_column("late")
        if at >= series.next_s:
            series.begin_sample(at)
            for column in series.columns.values():
                column.append(taken)
            taken += 1
        assert len(series.at_s) <= most
    times = list(series.at_s)
    assert times == sorted(times)
    assert all(len(column) == len(times) for column in series.columns.values())
    if taken:
        assert series.columns["n"][0] == 0, "the beginning is kept"
    if taken > most:
        # A sample is at least an interval after the one before, and thinning keeps every second.
        assert all(b - a >= series.interval_s / 2 for a, b in pairwise(times))


def test_the_sample_of_lengths_is_uniform_and_repeats() -> None:
    drawn: Counter[int] = Counter()
    for seed in range(300):
        sample = LengthSample(10, seed)
        for number in range(40):
            sample.offer(LengthPair(1.0, 2.0, None, number))
        assert len(sample.pairs()) == 10 and sample.seen == 40
        drawn.update(pair.actual_tokens for pair in sample.pairs())
    # 75 expected of each, with a standard deviation of 7.5
    assert set(drawn) == set(range(40)) and min(drawn.values()) > 40 and max(drawn.values()) < 110
    again = LengthSample(10, 299)
    for number in range(40):
        again.offer(LengthPair(1.0, 2.0, None, number))
    assert again.pairs() == sample.pairs()


def test_causes_are_bounded_and_without_numbers() -> None:
    assert cause_in_words("engine rollout-3-deadbeef01 died 4 times\nand more") == "engine rollout-#-# died # times"
    assert cause_in_words("  ") == "unknown" and len(cause_in_words("x" * 500)) == 120
    tally = FailureTally()
    for number in range(MOST_CAUSES + 50):
        tally.count("step", "x" * number, float(number))
    tally.count("step", "x", 999.0)
    rows = tally.rows()
    assert len(rows) <= MOST_CAUSES + 1 and sum(row.count for row in rows) == MOST_CAUSES + 51
    assert rows[0].cause == OTHER
    assert next(row for row in rows if row.cause == "x").latest_s == 999.0


def test_a_lane_tells_what_its_trajectory_did() -> None:
    history = RunHistory()
    engine = EngineDescription(EngineId("e"), 4, 4096)
    step = StepId(A, 0, 0)
    action = ActionRequest(ActionId("a/x"), A, "reward", "judge")
    start = cmd.StartStep(step, EngineId("e"), NORMAL, 1)
    history.take(ev.EngineJoined(0.0, engine), [])
    history.take(ev.HostJoined(0.0, HostDescription(HostId("h"), Resources.of(cpus=4))), [])
    history.take(ev.TrajectorySubmitted(1.0, TrajectorySpec(A, GroupId("g"))), [])
    history.take(ev.PredictionMade(1.5, A, 0, Prediction(40.0, 90.0)), [cmd.AdmitTrajectory(A)])
    history.take(ev.StepRequested(2.0, StepRequest(step, 100, 50)), [start])
    history.take(ev.StepStarted(3.0, step, EngineId("e")), [])
    history.take(ev.StepFinished(7.0, step, EngineId("e"), 30, 0, "stop"), [])
    history.take(ev.PredictionMade(7.0, A, 1, Prediction(5.0, 9.0)), [])
    history.take(ev.ActionRequested(7.0, action), [])
    history.take(
        ev.ActionFinished(7.5, ActionId("other"), HostId("h"), 0.1),
        [cmd.RunAction(action.action_id, HostId("h"), Resources.of(cpus=2))],
    )
    assert trajectory_of(history.lanes[A], 8.0, 10).seconds[PHASES.index("reward")] == 0.5
    history.take(ev.ActionFinished(9.0, action.action_id, HostId("h"), 1.5, ok=False), [])
    history.take(ev.TrajectoryEnded(9.5, A, "completed"), [])
    lane = trajectory_of(history.ended_lanes[0], 9.5, 10)
    names = [PHASES[phase] for phase in lane.segment_phases]
    assert names == ["admission", "driver", "llm queue", "generating", "tool queue", "reward", "driver"]
    assert lane.segment_starts_s == (1.0, 1.5, 2.0, 3.0, 7.0, 7.5, 9.0)
    assert lane.segment_engines == (-1, -1, 0, 0, -1, -1, -1)
    assert (lane.phase, lane.status, lane.steps, lane.generated_tokens) == ("ended", "completed", 1, 30)
    assert lane.seconds == (0.5, 1.0, 1.0, 4.0, 0.5, 0.0, 1.5, 0.0, 0.0, 0.0)
    assert history.lengths.pairs() == (LengthPair(40.0, 90.0, 35.0, 30),)
    assert [(row.boundary, row.cause) for row in history.failures.rows()] == [("action", "reward judge failed")]
    assert trajectory_of(history.ended_lanes[0], 9.5, 2).segments_omitted == 5


def test_the_longest_are_those_with_most_work_generated_and_predicted() -> None:
    history = RunHistory()
    for number, (predicted, admitted) in enumerate([(10.0, True), (500.0, True), (None, True), (900.0, False)]):
        name = TrajectoryId(f"t{number}")
        commands = [cmd.AdmitTrajectory(name)] if admitted else []
        history.take(ev.TrajectorySubmitted(float(number), TrajectorySpec(name, GroupId("g"))), commands)
        if predicted is not None:
            history.take(ev.PredictionMade(9.0, name, 0, Prediction(predicted, predicted)), [])
    shown = longest_of(history, 10, 10)
    assert [(lane.trajectory_id, lane.remaining_tokens) for lane in shown] == [
        ("t1", 500.0),
        ("t0", 10.0),
        ("t2", None),
    ]


def test_a_waiting_action_waits_for_cores_a_quota_or_its_service() -> None:
    history = RunHistory()
    host, service = HostId("g"), "judge"
    history.take(ev.HostJoined(0.0, HostDescription(host, Resources.of(gpus=1), "gpu")), [])
    history.take(ev.TrajectorySubmitted(0.0, TrajectorySpec(A, GroupId("g"))), [cmd.AdmitTrajectory(A)])
    asks = ActionRequest(ActionId("a/q"), A, "tool", "ask", ResourceDemand.of({"api:search": 1}))
    history.take(ev.ActionRequested(1.0, asks), [])
    history.take(
        ev.ActionFinished(1.5, ActionId("other"), host, 0.1),
        [cmd.RunAction(asks.action_id, host, Resources())],
    )
    history.take(ev.ActionFinished(2.0, asks.action_id, host, 1.0), [])
    judges = ActionRequest(ActionId("a/j"), A, "reward", "judge", ResourceDemand.of(gpus=1), "gpu", service)
    history.take(ev.ActionRequested(3.0, judges), [])
    history.take(ev.TimeReached(4.0), [cmd.LoadService(host, service, 0, 1)])
    run = cmd.RunAction(judges.action_id, host, Resources.of(gpus=1), gpus=1)
    history.take(ev.ServiceLoaded(6.0, host, service, 0, 1), [run])
    history.take(ev.TrajectoryEnded(7.0, A, "completed"), [])
    lane = trajectory_of(history.ended_lanes[0], 7.0, 20)
    spent = {name: seconds for name, seconds in zip(PHASES, lane.seconds, strict=True) if seconds}
    assert spent == {
        **{"driver": 2.0, "quota": 0.5, "tool": 0.5},
        **{"tool queue": 1.0, "service load": 2.0, "reward": 1.0},
    }
