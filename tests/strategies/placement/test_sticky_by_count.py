"""Sticky placement by count (veRL's rule): the fewest live trajectories first, then the home."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.core_builders import Stage, engine_of, step_of, trajectory_spec

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import TrajectoryId
from heddle_dask.strategies.placement.sticky import StickyByCount


def homed(*counts: int) -> list[Engine]:
    """Engines with so many live trajectories each."""
    made = [Engine(engine_of(f"E{number}"), number) for number in range(len(counts))]
    for engine, count in zip(made, counts, strict=True):
        engine.residents = {TrajectoryId(f"{engine.engine_id}-{i}"): None for i in range(count)}
    return made


def test_trajectories_count_and_not_their_tokens_or_the_slots() -> None:
    one, two = Engine(engine_of("E1", slots=64), 1), Engine(engine_of("E2", slots=1), 2)
    one.residents = {TrajectoryId("a"): None, TrajectoryId("b"): None}
    two.residents = {TrajectoryId("c"): None}
    one.resident_tokens, two.resident_tokens = 10, 1_000_000
    for seed in range(10):
        fresh = Trajectory(trajectory_spec("new"), 1)
        assert StickyByCount(seed).choose_engine(fresh, step_of("new"), [one, two]) is two


def test_a_burst_is_spread_to_the_same_number_everywhere() -> None:
    """A hash of the id would give some engines half as many again."""
    stage = Stage("verl")
    stage.join(*(f"E{number}" for number in range(5)))
    names = [f"t{number}" for number in range(40)]
    stage.submit(*names)
    counts = Counter(stage.placed(name, context=10 + 50 * number).engine_id for number, name in enumerate(names))
    assert sorted(counts.values()) == [8] * 5


def test_those_that_have_ended_do_not_count_and_those_in_tools_do() -> None:
    stage = Stage("verl")
    stage.join("E1", "E2")
    stage.submit("a", "b", "c")
    rests, ends = stage.placed("a"), stage.placed("b")
    for step in (rests, ends):
        stage.finish(step)
    stage.act("x", "a")
    stage.end("b")
    assert rests.engine_id != ends.engine_id == stage.placed("c").engine_id


def test_the_home_is_kept_until_it_is_lost() -> None:
    stage = Stage("verl")
    stage.join("E1", "E2")
    stage.submit("a", "b")
    home = stage.placed("a")
    stage.finish(home)
    stage.join("E3", "E4")
    again = stage.placed("a", 1)
    assert again.engine_id == home.engine_id
    stage.finish(again)
    stage.lose(home.engine_id)
    assert stage.placed("a", 2).engine_id != home.engine_id


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 99))
def test_no_candidate_has_fewer(counts: list[int], seed: int) -> None:
    among = homed(*counts)
    chosen = StickyByCount(seed).choose_engine(Trajectory(trajectory_spec("n"), 1), step_of("n"), among)
    assert len(chosen.residents) == min(counts)
