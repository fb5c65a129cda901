"""Orders of steps by predictions, service and groups."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.core_builders import Stage, step_of, trajectory_spec

from heddle_dask.core.commands import StartStep
from heddle_dask.core.entities import Trajectory
from heddle_dask.core.nouns import NORMAL, Prediction, Priority
from heddle_dask.core.state import State
from heddle_dask.core.view import ClusterView
from heddle_dask.cost.engine_cost import fixed_cost
from heddle_dask.strategies.scheduling import GroupFirst, LeastAttained, LongestFirst

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
    assert rule.priority(VIEW, predicted(100, 300, generated=50), step_of("a"), order=7) == Priority(0, priority)


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
