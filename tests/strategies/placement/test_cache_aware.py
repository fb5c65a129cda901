"""Cache-aware placement: the engine with the cached prefix, unless the load is skewed."""

from __future__ import annotations

import pytest
from worlds.core_builders import Stage, engine_of, step_of, trajectory_spec

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.strategies.placement.cache_aware import CacheAware


def loaded(*steps: int) -> list[Engine]:
    engines = []
    for number, count in enumerate(steps, start=1):
        engine = Engine(engine_of(f"E{number}"), number)
        engine.inflight = {TrajectoryId(f"x{number}-{i}"): None for i in range(count)}
        engines.append(engine)
    return engines


def at_home(name: str, home: str | None, group: str = "g") -> Trajectory:
    made = Trajectory(trajectory_spec(name, group=group), 1)
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
    assert rule.choose_engine(at_home("a2", None), step_of("a"), engines).engine_id == "E3", "its prompt is there"
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
