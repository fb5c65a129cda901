"""Why a trajectory ended last: each rule by one record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from worlds.record_builders import make_step

from heddle_dask.records.trajectory import ActionRecord, StepRecord, TrajectoryOutline
from heddle_dask.views.accounts import ControlFacts, Phase, StepWaits, account_of
from heddle_dask.views.report.reasons import Typical, recomputed, shown_s, why_last

NOTHING = Typical(dict.fromkeys(Phase, 0.0), most_tokens=10_000)


def _outline(steps: Any = (), actions: Any = (), stop_s: float = 100.0) -> TrajectoryOutline:
    return TrajectoryOutline(
        "t", "g", "task", "math", 0, 0, "completed", "", "", None, tuple(steps), tuple(actions), 0.0, stop_s
    )


def _step(at_s: float, queue: float, prefill: float, decode: float, **more: Any) -> StepRecord:
    times = {"submitted_s": at_s, "finished_s": at_s + queue + prefill + decode}
    step = replace(make_step(0, 0, 0, 4120), preemptions=0, queue_s=queue, prefill_s=prefill, decode_s=decode, **times)
    return replace(step, **more)


def _tool(at_s: float, run_s: float, queue_s: float = 0.0, kind: str = "tool", label: str = "search") -> ActionRecord:
    return ActionRecord(0, 0, kind, label, 1, "ok", at_s, at_s + queue_s + run_s, queue_s, run_s)


def _why(
    outline: TrajectoryOutline, facts: ControlFacts | None = None, typical: Typical = NOTHING, losses: int = 0
) -> str:
    return why_last(outline, account_of(outline, facts), typical, losses)


def test_the_longest_decode() -> None:
    outline = _outline([_step(0, 0, 0, 100)])
    assert _why(outline) == "decode: 4,120 tokens, 100 s, 100% of its time"
    assert _why(outline, typical=replace(NOTHING, most_tokens=4120)).startswith("longest decode: 4,120 tokens")


def test_admission() -> None:
    facts = ControlFacts(0.0, 31.0)
    assert _why(_outline([_step(0, 0, 0, 10)], stop_s=10.0), facts) == "waited 31 s for admission, 76% of its time"


def test_what_everybody_waits_for_is_no_reason() -> None:
    facts = ControlFacts(0.0, 31.0)
    typical = Typical({Phase.ADMISSION: 31.0}, 0)
    said = _why(_outline([_step(0, 0, 0, 10)], stop_s=10.0), facts, typical)
    assert said == "decode: 4,120 tokens, 10 s, 24% of its time"


def test_tools_by_label() -> None:
    actions = [_tool(0, 30), _tool(30, 18), _tool(60, 5, label="python")]
    said = _why(_outline(actions=actions))
    first, *rest = said.split("; ")
    assert first == "tool `search` 48 s in 2 calls"
    assert rest == ["all tools 53 s, 53% of its time", "outside of steps and actions: 47 s, 47% of its time"]
    assert _why(_outline(actions=[_tool(0, 100, kind="reward", label="judge")])) == (
        "reward `judge` 100 s, 100% of its time"
    )


@pytest.mark.parametrize(
    ("outline", "facts", "said"),
    [
        (_outline([_step(0, 90, 0, 10)]), None, "waited 90 s for an engine or a slot, 90% of its time"),
        (
            _outline(actions=[_tool(0, 10, 90)]),
            None,
            "waited 90 s for resources of its actions, 90% of its time",
        ),
        (
            _outline([_step(0, 90, 0, 10)]),
            ControlFacts(0.0, 0.0, waits={("", 0): StepWaits(moving_s=90.0)}),
            "waited 90 s for its context to move, 90% of its time",
        ),
        (_outline([_step(0, 5, 0, 5)]), None, "outside of steps and actions: 90 s, 90% of its time"),
        (_outline(stop_s=0.0), None, "it took no time"),
    ],
)
def test_waiting(outline: TrajectoryOutline, facts: ControlFacts | None, said: str) -> None:
    assert _why(outline, facts) == said


def test_preempted_and_recomputed() -> None:
    steps = [
        _step(0, 30, 0, 10, preemptions=3),
        _step(40, 0, 50, 10, step_index=1, prompt_tokens=1000, cached_tokens=100),
    ]
    said = _why(_outline(steps))
    assert said.startswith("prefill of 900 tokens: 50 s, 50% of its time; waited 30 s for an engine")
    assert said.endswith("preempted 3 times; recomputed its context once")


def test_its_engine_was_lost() -> None:
    facts = ControlFacts(0.0, 0.0, attempts=[("", 1, 10.0, 90.0)])
    outline = _outline([_step(0, 0, 0, 10)])
    assert _why(outline, facts, losses=1) == "its engine was lost: 80 s, 80% of its time"
    assert _why(outline, facts).startswith("attempts without result: 80 s")
    late = _why(_outline([_step(0, 0, 0, 100)]), losses=2)
    assert late.endswith("its engine was lost 2 times")


def test_the_first_step_of_a_branch_recomputes_only_where_its_context_is_old() -> None:
    first = _step(0, 0, 1, 1, prompt_tokens=100, cached_tokens=0)
    assert recomputed([first]) == 0
    assert recomputed([first, replace(first, step_index=1)]) == 1
    assert recomputed([replace(first, branch=1, step_index=4)]) == 1


def test_medians() -> None:
    rows = [{Phase.TOOL: 1_000_000_000 * seconds} for seconds in (1, 5, 9)]
    typical = Typical.of(rows, [3, 7])
    assert typical.seconds[Phase.TOOL] == 5.0 and typical.seconds[Phase.DECODE] == 0.0 and typical.most_tokens == 7
    assert Typical.of(rows[:2], []).seconds[Phase.TOOL] == 0.0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0 ms"),
        (0.9996, "1.0 s"),
        (9.96, "10 s"),
        (48.2, "48 s"),
        (1307, "1,307 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_durations_for_people(seconds: float, said: str) -> None:
    assert shown_s(seconds) == said
