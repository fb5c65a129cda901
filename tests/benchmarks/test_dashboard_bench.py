"""``python -m benchmarks dashboard``: rows that add up, and the simulated rollout that is shown."""

from __future__ import annotations

import pytest

from benchmarks.dashboard import UPDATES, measure_dashboard
from benchmarks.dashboard_demo import PlayedRun
from benchmarks.dashboard_run import RunSize, simulated_run
from heddle_dask.core import events as ev


def test_a_row_has_the_cost_of_the_picture_once_and_of_every_tab() -> None:
    (row,) = measure_dashboard([40], seed=0)
    assert (row.trajectories, row.updates) == (40, UPDATES)
    assert row.one_tab_ms_per_s == pytest.approx(row.picture_ms + row.views_ms + row.tab_ms, abs=0.02)
    assert row.ten_tabs_ms_per_s == pytest.approx(row.one_tab_ms_per_s + 9 * row.tab_ms, abs=0.1)
    assert 0 < row.live <= 40
    assert row.tab_kib > 1
    assert row.trajectories == 40


@pytest.mark.parametrize("trajectories", [1, 7, 10, 500, 10_000])
@pytest.mark.parametrize("live_share", [0.5, 1.0])
def test_a_cluster_has_slots_for_the_share_that_may_be_live(trajectories: int, live_share: float) -> None:
    size = RunSize.of(trajectories, live_share)
    assert size.engines * size.slots >= live_share * trajectories
    assert trajectories % size.samples == 0


def test_the_played_rollout_is_the_same_every_time_and_has_everything_that_the_page_shows() -> None:
    pairs = simulated_run(320)
    assert simulated_run(320) == pairs
    run = PlayedRun(pairs, lambda: 0.0)
    picture = run.at(run.ended_s(1.0) + 1)
    assert picture.journal_offset == len(pairs)
    assert picture.counts.ended == {"completed": 320}
    assert picture.lengths and picture.moves and picture.counts.preemptions
    assert {each.boundary for each in picture.failures} >= {"action", "engine"}
    assert sum(isinstance(event, ev.TrajectoryEnded) for event, _ in pairs) == 320


def test_the_demo_gives_a_tab_the_same_picture_until_something_changes() -> None:
    moment_s = [10.0]
    run = PlayedRun(simulated_run(10), lambda: moment_s[0])
    first = run.latest()
    assert run.latest() is first
