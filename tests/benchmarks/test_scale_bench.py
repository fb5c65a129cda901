"""``python -m benchmarks scale``: rows that add up, and refusals in one line."""

from __future__ import annotations

import math

import pytest

from benchmarks.scale import _with_growth, build_world, measure_scale
from heddle_dask.core.errors import BadInput


def test_rows_come_from_processes_of_their_own_and_say_how_much_was_done() -> None:
    (row,) = measure_scale(["heddle"], [160], seed=0)
    world = build_world("heddle", 160, 0)
    world.run()
    assert (row.trajectories, row.gpus, row.growth) == (160, 2, 1.0)
    assert row.steps == sum(len(program.plan.steps) for program in world.programs.values())
    assert row.events == world.events > 3 * row.steps
    assert row.makespan_s == round(max(program.finished_s for program in world.programs.values()), 3)
    assert row.peak_bytes > 2**20
    assert row.preset == "heddle"


def test_growth_is_one_for_n_log_n_and_more_for_its_square() -> None:
    (first,) = measure_scale(["slime"], [160], seed=0)
    ratio = 1600 * math.log(1600) / (160 * math.log(160))
    fields = {name: getattr(first, name) for name in first.__slots__}
    bigger = {**fields, "trajectories": 1600}
    assert _with_growth(type(first)(**{**bigger, "cpu_s": first.cpu_s * ratio}), first).growth == 1.0
    assert _with_growth(type(first)(**{**bigger, "cpu_s": first.cpu_s * 100}), first).growth > 5


def test_unknown_presets_and_broken_sizes_are_refused() -> None:
    with pytest.raises(BadInput, match="unknown strategy 'nonsense'"):
        list(measure_scale(["nonsense"], [160], seed=0))
    with pytest.raises(BadInput, match="use multiples of 16"):
        list(measure_scale(["slime"], [170], seed=0))
