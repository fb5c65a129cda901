"""Only what is known at the time enters: features, group facts, and the decision points of recorded traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.predictor_builders import trajectory

from benchmarks.predictor_trace import finished, read_finished
from heddle_dask.core.errors import BadInput
from heddle_dask.predictors.features import (
    FEATURES,
    NO_SIBLINGS,
    GroupFacts,
    Progress,
    facts_array,
    matrix,
)
from heddle_dask.predictors.prompt_history import Expectation
from heddle_dask.predictors.samples import GroupBook, facts_then
from heddle_dask.workloads.traces import TracedStep, TracedTrajectory

# The log of the length itself is the excess, and nothing fades.
BARE = Expectation(lambda one: 0.0, lambda one: 0.0)


def _features(row: Progress, facts: GroupFacts = NO_SIBLINGS) -> np.ndarray:
    return matrix([row], facts_array([facts]), np.array([5.0]), np.array([5.5]), {"bash": 0.5})


def test_matrix_has_one_column_per_feature() -> None:
    one = trajectory("a")
    assert _features(one.points[0]).shape == (1, len(FEATURES))
    assert _features(one.points[3]).shape == (1, len(FEATURES))


STEP = st.fixed_dictionaries(
    {
        "generated_tokens": st.integers(1, 5000),
        "observation_tokens": st.integers(0, 5000),
        "tool": st.sampled_from([None, "Read", "Bash"]),
        "tool_s": st.one_of(st.none(), st.floats(0, 900)),
        "llm_s": st.floats(0.1, 60),
        "human": st.booleans(),
    }
)


def _traced(steps: list[dict[str, object]]) -> TracedTrajectory:
    made = tuple(TracedStep(input_tokens=None, **step) for step in steps)  # type: ignore[arg-type]
    return TracedTrajectory("t", "g", 100, True, None, made)


@given(
    past=st.lists(STEP, min_size=0, max_size=5),
    one_future=st.lists(STEP, min_size=1, max_size=5),
    other_future=st.lists(STEP, min_size=1, max_size=5),
    derived=st.booleans(),
    last_tool_s=st.tuples(st.floats(0, 900), st.floats(0, 900)),
)
@settings(max_examples=25, deadline=None)
def test_future_changes_no_feature(
    past: list[dict[str, object]],
    one_future: list[dict[str, object]],
    other_future: list[dict[str, object]],
    derived: bool,
    last_tool_s: tuple[float, float],
) -> None:
    rows = []
    for future, tool_s in zip((one_future, other_future), last_tool_s, strict=True):
        steps = [*past, *future]
        origins: list[dict[str, object]] = [{} for _ in steps]
        if derived and past:
            # Lesson 10: where a gap is recorded, the last tool's time comes from the next call.
            steps[len(past) - 1] = {**past[-1], "tool_s": tool_s}
            origins[len(past) - 1] = {"gap_s": tool_s + 3.0}
        made = finished(_traced(steps), {"t0_s": 5.0, "steps": origins}, 0)
        rows.append(made.points[len(past)])
    assert repr(rows[0]) == repr(rows[1])
    np.testing.assert_array_equal(_features(rows[0]), _features(rows[1]))


def test_derived_tool_time_is_known_one_step_later() -> None:
    step = {
        "generated_tokens": 10,
        "observation_tokens": 1,
        "tool": "Bash",
        "tool_s": 7.0,
        "llm_s": 2.0,
        "human": False,
    }
    made = finished(_traced([step, step, step]), {"t0_s": 0.0, "steps": [{"gap_s": 9.0}] * 3}, 0)
    assert np.isnan(made.points[1].tool_times_s[-1])
    assert made.points[1].tools_s == 0.0 and made.points[1].elapsed_s == 2.0 and made.points[1].at_s == 2.0
    assert made.points[2].tool_times_s[0] == 7.0
    assert made.points[2].tools_s == 7.0 and made.points[2].elapsed_s == 11.0


@given(end=st.floats(0, 100), at=st.floats(0, 100), total=st.integers(1, 10_000))
def test_sibling_is_known_only_once_it_has_ended(end: float, at: float, total: int) -> None:
    row = replace(trajectory("me", start_s=0.0).points[1], at_s=at)
    sibling = replace(trajectory("other", start_s=0.0), started_at_s=0.0, ended_at_s=end, generated_tokens=total)
    facts = facts_then(row, [sibling], BARE)
    assert facts.finished == (1 if end <= at else 0)
    if end > at:
        longer = facts_then(row, [replace(sibling, generated_tokens=total + 999)], BARE)
        assert repr(longer) == repr(facts)


def test_own_future_is_no_fact_of_the_group() -> None:
    one = trajectory("me", start_s=0.0)
    assert facts_then(one.points[0], [one], BARE) == NO_SIBLINGS
    assert facts_then(trajectory("me").points[0], [trajectory("me")], BARE) == NO_SIBLINGS


def test_running_sibling_shows_what_it_had_by_then() -> None:
    me, other = trajectory("me", start_s=0.0), trajectory("other", steps=9, start_s=0.0)
    facts = facts_then(me.points[2], [me, other], BARE)
    assert (facts.finished, facts.running) == (0, 1)
    assert facts.running_largest == facts.running_mean == pytest.approx(np.log1p(200))
    late = trajectory("late", steps=9, start_s=me.points[2].at_s)
    facts = facts_then(me.points[2], [me, other, late], BARE)
    assert (facts.running, facts.running_largest) == (2, pytest.approx(np.log1p(200)))
    assert facts.running_mean == pytest.approx(np.log1p(100))


def test_book_and_past_agree() -> None:
    members = [trajectory("a", steps=2, start_s=0.0), trajectory("b", steps=7, start_s=0.0)]
    row = trajectory("me", start_s=0.0).points[3]
    book = GroupBook()
    for one in members:
        for point in one.points:
            if point.at_s <= row.at_s:
                book.running(point)
    book.finish(members[0])
    assert repr(book.facts(row, BARE)) == repr(facts_then(row, members, BARE))


def test_empty_trace_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    with pytest.raises(BadInput, match="no trajectory"):
        read_finished(path)


def test_recorded_traces_are_read() -> None:
    made = read_finished(Path("tau_dialogues"))
    assert len(made) == 1570
    assert sum(one.censored for one in made) == 12
    assert all(one.points[0].generated_tokens == 0 for one in made)
