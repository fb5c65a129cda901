"""Where each second went: phases sum to the duration, whatever the record; and each rule of the attribution."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.record_builders import make_step, plain_trajectory

from heddle_dask.records.trajectory import ActionRecord, StepRecord, TrajectoryOutline
from heddle_dask.views.accounts import (
    ControlFacts,
    Phase,
    StepWaits,
    TimeSegment,
    account_of,
    flattened,
    summed,
)


def _outline(steps: Any = (), actions: Any = (), start_s: float = 0.0, stop_s: float = 10.0) -> TrajectoryOutline:
    return TrajectoryOutline(
        "t",
        "g",
        "task",
        "math",
        0,
        0,
        "completed",
        "",
        "",
        None,
        tuple(steps),
        tuple(actions),
        start_s,
        stop_s,
    )


def _step(at_s: float, end_s: float, queue: float, prefill: float, decode: float, **more: Any) -> StepRecord:
    step = replace(
        make_step(0, 0, 0, 5),
        submitted_s=at_s,
        finished_s=end_s,
        queue_s=queue,
        prefill_s=prefill,
        decode_s=decode,
    )
    return replace(step, **more)


def _action(at_s: float, end_s: float, run_s: float, kind: str = "tool", status: str = "ok") -> ActionRecord:
    return ActionRecord(0, 0, kind, "python", 1, status, at_s, end_s, end_s - at_s - run_s, run_s)


def _seconds(outline: TrajectoryOutline, facts: ControlFacts | None = None) -> dict[str, float]:
    account = account_of(outline, facts)
    return {str(phase): ns / 1e9 for phase, ns in account.phases_ns.items() if ns}


def test_a_step_and_a_tool_one_after_the_other() -> None:
    outline = _outline([_step(0, 4, 1, 0.5, 2)], [_action(5, 9, 3), _action(9, 10, 1, "reward")])
    assert _seconds(outline) == {
        "llm_queue": 1, "prefill": 0.5, "decode": 2, "tool_queue": 1, "tool": 3, "reward": 1, "driver": 1.5,
    }  # fmt: skip


def test_the_wait_for_admission_comes_from_the_journal() -> None:
    facts = ControlFacts(submitted_s=100.0, admitted_s=107.0)
    account = account_of(_outline(), facts)
    assert account.duration_s == 17.0 and account.seconds(Phase.ADMISSION) == 7.0 and account.admission_known
    without = account_of(_outline())
    assert without.duration_s == 10.0 and not without.admission_known and not without.waits_known


def test_actions_that_overlap_count_once() -> None:
    outline = _outline(actions=[_action(0, 6, 6), _action(2, 8, 4)])
    assert _seconds(outline) == {"tool": 8.0, "driver": 2.0}


def test_work_counts_before_waiting() -> None:
    forks = [_step(0, 10, 9, 0, 1), _step(0, 6, 0, 2, 4, branch=1)]
    assert _seconds(_outline(forks)) == {"prefill": 2.0, "decode": 5.0, "llm_queue": 3.0}


def test_a_move_that_a_step_waits_for_is_no_queue() -> None:
    facts = ControlFacts(0.0, 0.0, waits={("", 0): StepWaits(moving_s=2.0)})
    assert _seconds(_outline([_step(0, 10, 3, 1, 6)]), facts) == {
        "llm_queue": 1, "migration": 2, "prefill": 1, "decode": 6,
    }  # fmt: skip


def test_lost_attempts_of_a_step() -> None:
    waits = StepWaits(stranded_s=1.0, failed_s=4.0)
    facts = ControlFacts(0.0, 0.0, waits={("", 0): waits})
    step = _step(0, 10, 2, 1, 2)
    assert _seconds(_outline([step]), facts) == {
        "llm_queue": 1, "lost": 5, "prefill": 1, "decode": 2, "driver": 1,
    }  # fmt: skip


def test_a_step_that_has_no_record_is_without_result() -> None:
    facts = ControlFacts(50.0, 51.0, attempts=[("", 0, 52.0, 55.0), ("", 1, 56.0, math.nan)])
    outline = _outline([_step(1, 4, 0, 1, 2)])
    # Step 0 has a record, step 1 was open when the trajectory ended; the session's clock is 51 s ahead.
    assert _seconds(outline, facts) == {"admission": 1, "prefill": 1, "decode": 2, "lost": 5, "driver": 2}


def test_an_action_that_did_not_end_and_one_that_was_lost() -> None:
    pending = ActionRecord(0, 0, "tool", "x", 0, "pending", 6.0, math.nan, math.nan, math.nan)
    assert _seconds(_outline(actions=[pending, _action(0, 2, 0, status="lost")])) == {"lost": 6, "driver": 4}


def test_times_that_an_engine_does_not_report_are_not_invented() -> None:
    outline = _outline([_step(0, 5, 1, math.nan, math.nan)])
    assert _seconds(outline) == {"llm_queue": 1, "generation": 4, "driver": 5}


def test_work_of_an_earlier_session_is_not_in_the_duration() -> None:
    replayed = [_step(0, 0.01, 30, 20, 100)]
    account = account_of(_outline(replayed, [_action(1, 1.001, 60)]))
    assert account.earlier_s == 180.0 and _seconds(_outline(replayed)) == {"driver": 10.0}


def test_waits_of_forks_go_to_their_branches() -> None:
    steps = [
        _step(0, 2, 1, 0, 1),
        _step(2, 6, 2, 0, 2, branch=1, step_index=1),
        _step(6, 9, 3, 0, 0, branch=2),
    ]
    waits = {("#1", 1): StepWaits(moving_s=1.5), ("#2", 0): StepWaits(moving_s=3.0)}
    facts = ControlFacts(0.0, 0.0, waits=waits, paths=["", "#2", "#1"])
    assert _seconds(_outline(steps), facts)["migration"] == 4.5
    # A fork that did nothing that is recorded: which number is which cannot be told.
    unclear = replace(facts, paths=["", "#2", "#1", "#3"])
    assert "migration" not in _seconds(_outline(steps), unclear)


_times = st.one_of(st.just(math.nan), st.floats(-5, 50))
_spans = st.lists(
    st.builds(
        lambda start, length, phase: TimeSegment(start, start + length, phase),
        st.integers(-50, 150), st.integers(0, 60), st.sampled_from(list(Phase)[:-1]),
    ),
    max_size=12,
)  # fmt: skip


@given(_spans)
def test_segments_cover_the_time_once(spans: list[TimeSegment]) -> None:
    segments = flattened(spans, 0, 100)
    assert segments[0].start_ns == 0 and segments[-1].stop_ns == 100
    for first, second in itertools.pairwise(segments):
        assert first.stop_ns == second.start_ns and first.phase is not second.phase
    assert sum(summed(segments).values()) == 100
    order = list(Phase)
    for start, stop, phase in segments:
        for at in (start, stop - 1):
            here = [span.phase for span in spans if span.start_ns <= at < span.stop_ns]
            assert phase is min(here, key=order.index, default=Phase.DRIVER)


@given(st.data())
def test_phases_sum_to_the_duration_exactly(data: st.DataObject) -> None:
    draw = data.draw
    steps = [
        _step(
            *draw(st.tuples(_times, _times, _times, _times, _times)),
            branch=draw(st.integers(0, 2)),
            step_index=i,
        )
        for i in range(draw(st.integers(0, 4)))
    ]
    actions = [
        ActionRecord(i, 0, draw(st.sampled_from(["tool", "reward"])), "x", 1, draw(st.sampled_from(["ok", "lost"])),
                     *draw(st.tuples(_times, _times, _times, _times)))
        for i in range(draw(st.integers(0, 3)))
    ]  # fmt: skip
    waits = {("", i): StepWaits(*draw(st.tuples(*[st.floats(0, 9)] * 3))) for i in range(4)}
    facts = draw(
        st.none()
        | st.builds(
            lambda submitted, admitted, tries: ControlFacts(submitted, admitted, waits=waits, attempts=tries),
            _times, _times, st.lists(st.tuples(st.just(""), st.integers(0, 5), _times, _times), max_size=3),
        )
    )  # fmt: skip
    account = account_of(_outline(steps, actions, draw(st.floats(-5, 50)), draw(st.floats(-5, 50))), facts)
    assert sum(account.phases_ns.values()) == account.duration_ns
    assert all(ns >= 0 for ns in account.phases_ns.values())
    assert sum(map(account.share, Phase)) == pytest.approx(1.0 if account.duration_ns else 0.0)


def test_a_whole_record_is_taken_as_well() -> None:
    record = plain_trajectory(0)
    account = account_of(record)
    assert account.duration_s == 10.0 and sum(account.phases_ns.values()) == account.duration_ns


def test_the_wait_of_an_action_is_told_by_what_it_waited_for() -> None:
    action = ActionRecord(0, -1, "tool", "ask", 1, "ok", 0.0, 10.0, 7.0, 3.0, quota_s=4.0, load_s=2.0)
    account = account_of(_outline(actions=[action]))
    assert [(part.phase, (part.stop_ns - part.start_ns) / 1e9) for part in account.segments] == [
        (Phase.QUOTA, 4.0),
        (Phase.TOOL_QUEUE, 1.0),
        (Phase.SERVICE_LOAD, 2.0),
        (Phase.TOOL, 3.0),
    ]
