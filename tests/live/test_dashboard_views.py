"""What the panels show of a snapshot: bounded whatever the size, sent only when changed, escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.dashboard_demo import PlayedRun
from benchmarks.dashboard_run import simulated_run
from benchmarks.page_tab import PageTab
from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.ids import FIRST_RUN, EngineId, GroupId, PolicyVersion, StepId, TrajectoryId
from heddle_dask.core.nouns import NORMAL, EngineDescription, StepRequest, TrajectorySpec
from heddle_dask.live.scheduler.dashboard import style
from heddle_dask.live.scheduler.dashboard.pages import PANELS, OpenPage
from heddle_dask.live.scheduler.dashboard.panels.actions import actions_view
from heddle_dask.live.scheduler.dashboard.panels.engines import MOST_ROWS as MOST_ENGINES
from heddle_dask.live.scheduler.dashboard.panels.engines import engines_view
from heddle_dask.live.scheduler.dashboard.panels.failures import failures_view
from heddle_dask.live.scheduler.dashboard.panels.headline import headline_view, tokens_per_s
from heddle_dask.live.scheduler.dashboard.panels.lengths import MOST_POINTS, lengths_view
from heddle_dask.live.scheduler.dashboard.panels.live import (
    STACKED,
    live_view,
    series_until_now,
    tail_began_s,
)
from heddle_dask.live.scheduler.dashboard.panels.moves import moves_view
from heddle_dask.live.scheduler.dashboard.panels.timeline import (
    FINEST_SHARE,
    MOST_ROWS,
    MOST_SEGMENTS,
    merged_segments,
    timeline_view,
)
from heddle_dask.live.scheduler.dashboard.panels.training import training_view
from heddle_dask.live.scheduler.dashboard.view import View, Views
from heddle_dask.views.history import phases
from heddle_dask.views.history.history_pictures import picture_of
from heddle_dask.views.history.run_history import RunHistory
from heddle_dask.views.history.run_snapshot import FailureView, LengthPair, RunSnapshot, TrajectoryView
from heddle_dask.views.history.training_history import MOST_POINTS as MOST_TRAINING_POINTS

EMPTY = picture_of(RunHistory(), session="", is_open=False, strategy="", now_s=0.0)
THOUSANDS = 10_000


@lru_cache(maxsize=1)
def played() -> list[RunSnapshot]:
    """A simulated rollout of 96 trajectories at six moments, the last after its end."""
    run = PlayedRun(simulated_run(96), lambda: 0.0)
    over_s = run.ended_s(1.0)
    return [run.at(over_s * share) for share in (0.1, 0.3, 0.5, 0.7, 0.9, 1.01)]


@lru_cache(maxsize=1)
def thousands() -> RunSnapshot:
    """A picture with 10,000 live trajectories on 200 engines, each of many short steps."""
    history = RunHistory()
    engines = [EngineId(f"engine-{number}") for number in range(200)]
    for engine_id in engines:
        history.take(ev.EngineJoined(0.0, EngineDescription(engine_id, 50, 32_000)), [])
    names = [TrajectoryId(f"t{number}") for number in range(THOUSANDS)]
    for name in names:
        spec = TrajectorySpec(name, GroupId(f"g{name}"), 0)
        history.take(ev.TrajectorySubmitted(0.0, spec), [cmd.AdmitTrajectory(name)])
    at = 1.0
    for index in range(2):
        for number, name in enumerate(names):
            at += 0.001
            step, engine_id = StepId(name, index, 0), engines[number % len(engines)]
            started = cmd.StartStep(step, engine_id, NORMAL, number)
            history.take(ev.StepRequested(at, StepRequest(step, 100, 50)), [started])
            history.take(ev.StepStarted(at + 0.0002, step, engine_id), [])
            if index == 0:
                history.take(ev.StepFinished(at + 0.0004, step, engine_id, 20, 0, "stop"), [])
    return picture_of(history, session="large", is_open=True, strategy="heddle", now_s=at)


def glyphs(view: View) -> int:
    return sum(len(next(iter(columns.values()))) for columns in view.sources.values())


def test_ten_thousand_trajectories_are_a_few_hundred_glyphs_and_a_few_kilobytes_of_text() -> None:
    snapshot = thousands()
    assert snapshot.counts.live == THOUSANDS
    for panel in PANELS:
        view = panel.make(snapshot)
        most = 3000 if panel.name == "timeline" else 1100
        assert glyphs(view) <= most, panel.name
        assert len(view.heading) + len(view.html) < 8000, panel.name
    assert len(timeline_view(snapshot).rows) == MOST_ROWS
    assert "10,000" in headline_view(snapshot).heading
    assert f'data-figure="live" data-value="{THOUSANDS}"' in headline_view(snapshot).heading


def test_engines_beyond_the_rows_are_the_busiest_and_the_mean_of_the_others() -> None:
    snapshot = thousands()
    view = engines_view(snapshot)
    assert len(view.rows) == MOST_ENGINES
    assert view.rows[-1] == f"{200 - MOST_ENGINES + 1} others"
    columns = view.sources["engines"]
    others = len(snapshot.engines) - MOST_ENGINES + 1
    total = columns["generating"][:-1].sum() + others * columns["generating"][-1]
    assert round(total) == sum(engine.generating for engine in snapshot.engines) == THOUSANDS
    assert list(columns["generating"][:-1]) == sorted(columns["generating"][:-1], reverse=True)


def test_an_engine_that_drains_says_so_and_a_lost_one_is_gone() -> None:
    first, second, *_ = played()[0].engines
    engines = (replace(first, state="draining"), replace(second, state="lost"))
    assert engines_view(replace(played()[0], engines=engines)).rows == (f"{first.engine_id} (draining)",)
    idle = replace(first, is_idle=True)
    assert engines_view(replace(played()[0], engines=(idle,))).rows == (f"{first.engine_id} (idle)",)
    lost = replace(first, state="lost")
    assert engines_view(replace(played()[0], engines=(lost,))).empty == "No engine is there now."
    assert engines_view(replace(played()[0], engines=())).empty == "No engine has joined yet."


def test_every_panel_says_why_it_is_empty() -> None:
    for panel in PANELS:
        view = panel.make(EMPTY)
        told = re.sub(r"<[^>]*>", "", view.empty + view.heading + view.html)
        assert re.search(r"No |Nothing ", told), panel.name
    begun = replace(EMPTY, session="s", is_open=True)
    assert timeline_view(begun).empty == live_view(begun).empty == "No trajectory yet."


def test_columns_of_a_source_have_one_length_at_every_moment() -> None:
    for snapshot in (EMPTY, *played(), thousands()):
        for panel in PANELS:
            for columns in panel.make(snapshot).sources.values():
                assert len({len(column) for column in columns.values()}) == 1, panel.name


def test_the_stack_of_phases_is_the_number_of_live_trajectories() -> None:
    for snapshot in played():
        series = series_until_now(snapshot)
        stacked = sum(series[name.replace(" ", "_")] for name in STACKED)
        assert np.array_equal(stacked, series["live"])
        assert np.all(np.diff(series["at"]) >= 0)
        assert set(STACKED) == set(phases.PHASES) - {"admission"}


def test_the_tail_begins_when_nine_tenths_have_ended() -> None:
    early, late = played()[0], played()[-1]
    assert tail_began_s(early) is None
    began_s = tail_began_s(late)
    assert began_s is not None and 0 < began_s < late.at_s
    assert "the last 10% of the trajectories took" in live_view(late).heading
    assert tail_began_s(EMPTY) is None


def test_segments_cover_the_life_of_a_trajectory_without_gaps() -> None:
    for snapshot in played():
        for trajectory in (*snapshot.longest, *snapshot.latest_ended):
            segments = merged_segments(trajectory, snapshot.now_s, 0.0)
            ends_s = snapshot.now_s if trajectory.ended_s is None else trajectory.ended_s
            assert segments[0][0] == trajectory.segment_starts_s[0]
            assert segments[-1][1] == ends_s
            assert all(one[1] == other[0] for one, other in pairwise(segments))


@given(
    starts_s=st.lists(st.floats(0, 1000), min_size=1, max_size=300, unique=True).map(sorted),
    finest_s=st.floats(0, 50),
    chosen=st.randoms(use_true_random=False),
)
def test_merging_leaves_no_gap_and_keeps_what_can_be_seen(starts_s: list[float], finest_s: float, chosen: Any) -> None:
    view = trajectory(starts_s, [chosen.randrange(len(phases.PHASES)) for _ in starts_s])
    merged = merged_segments(view, 1000.0, finest_s)
    assert (merged[0][0], merged[-1][1]) == (starts_s[0], 1000.0)
    assert all(one[1] == other[0] for one, other in pairwise(merged))
    assert {each[0] for each in merged} <= set(starts_s)
    assert all(one[2:] != other[2:] for one, other in pairwise(merged))
    for begin_s, end_s, kind in zip(starts_s, [*starts_s[1:], 1000.0], view.segment_phases, strict=True):
        if end_s - begin_s >= finest_s and end_s > begin_s:
            (around,) = [each for each in merged if each[0] <= begin_s < each[1]]
            assert around[1] >= end_s
            assert around[2] == kind


def trajectory(starts_s: Iterable[float], kinds: Iterable[int]) -> TrajectoryView:
    starts = tuple(starts_s)
    return replace(
        played()[1].longest[0],
        segment_starts_s=starts,
        segment_phases=tuple(kinds),
        segment_engines=(0,) * len(starts),
        ended_s=None,
    )


def test_a_timeline_with_more_segments_than_pixels_is_thinned() -> None:
    busy = [trajectory([i * 0.01 for i in range(600)], [i % 4 for i in range(600)]) for _ in range(20)]
    snapshot = replace(played()[1], longest=tuple(busy), latest_ended=(), now_s=6.0)
    drawn = len(timeline_view(snapshot).sources["segments"]["row"])
    assert MOST_SEGMENTS < 20 * 600
    assert drawn <= 20 * 2 / FINEST_SHARE
    assert drawn < 20 * 350


def test_lengths_are_at_most_so_many_points_and_none_at_zero() -> None:
    pairs = tuple(LengthPair(float(i % 7), 2.0 * i, None if i % 2 else 0.0, i) for i in range(1500))
    view = lengths_view(replace(played()[1], lengths=pairs, lengths_seen=9000))
    assert len(view.sources["before"]["predicted"]) == MOST_POINTS
    assert all(np.all(column >= 1.0) for name in ("before", "after") for column in view.sources[name].values())
    assert "9,000 ended with a prediction, 400 shown" in view.heading


def trained(lineage: str = "first") -> RunSnapshot:
    """Two engines, of which one has taken the second version, one has refused it; and the loop's figures."""
    history, version = RunHistory(), PolicyVersion(lineage, 2)
    for name in ("a", "b"):
        history.take(ev.EngineJoined(0.0, EngineDescription(EngineId(name), 4, 100, lineage=lineage)), [])
    history.take(ev.OptimizerStepEnded(1.0, FIRST_RUN, version), [])
    history.take(ev.WeightsPublished(1.1, version, "file:///weights"), [])
    history.take(ev.WeightsInstalled(2.0, EngineId("a"), version, paused_s=0.04), [])
    history.take(ev.WeightsInstalled(2.1, EngineId("b"), version, cause="a bucket of 4 is damaged"), [])
    history.take(ev.WeightsInstalled(2.2, EngineId("left"), version, paused_s=9.0), [])
    for step in (1, 2, 2):
        history.training.add_point(step, {"reward": step / 4, "held_out_reward": 0.9} if step == 2 else {"reward": 0.1})
    return picture_of(history, session="s", is_open=True, strategy="heddle", now_s=3.0)


def test_training_shows_versions_pauses_and_every_step_once() -> None:
    snapshot = trained()
    training = snapshot.training
    assert training is not None
    assert training.engines_by_version == {"first:0": 1, "first:2": 1}
    assert (training.optimizer_steps, training.published, training.updates) == (2, "first:2", 1)
    assert (training.paused_mean_s, training.paused_max_s) == (0.04, 0.04)
    assert [point.step for point in training.points] == [1, 2]
    assert [(each.boundary, each.count) for each in snapshot.failures] == [("weights", 1)]
    view = training_view(snapshot)
    assert list(view.sources["reward"]["value"]) == [0.1, 0.5]
    assert list(view.sources["held_out_reward"]["step"]) == [2.0]
    assert 'data-value="2"' in view.heading and "1</b> at first:0" in view.heading
    assert snapshot.as_json()["training"]["points"][1]["figures"] == {"reward": 0.5, "held_out_reward": 0.9}
    history = RunHistory()
    for step in range(MOST_TRAINING_POINTS + 10):
        history.training.add_point(step, {})
    long = history.training.view()
    assert long is not None and len(long.points) == MOST_TRAINING_POINTS


def test_a_rollout_alone_shows_no_training() -> None:
    assert played()[1].training is None
    assert training_view(played()[1]).empty == "Nothing is trained on this cluster."


def test_texts_of_users_are_escaped() -> None:
    bad = "<script>alert(1)</script>"
    snapshot = played()[2]
    snapshot = replace(
        snapshot,
        session=bad,
        strategy=bad,
        failures=(FailureView(bad, bad, 3, 1.0, bad),),
        actions=tuple(replace(each, label=bad) for each in snapshot.actions),
        moves=tuple(replace(each, kind=bad) for each in snapshot.moves),
        counts=replace(snapshot.counts, ended={bad: 3}),
    )
    for make in (headline_view, failures_view, actions_view, moves_view):
        view = make(snapshot)
        assert "<script" not in view.heading + view.html
    training = training_view(trained(bad))
    assert "<script" not in training.heading + training.html
    assert "&lt;script&gt;" in failures_view(snapshot).html


def test_tokens_per_second_are_those_of_the_last_ten_seconds() -> None:
    snapshot = played()[3]
    series = snapshot.series
    since = max(i for i, at_s in enumerate(series.at_s) if at_s <= snapshot.now_s - 10)
    tokens = snapshot.counts.generated_tokens - series.generated_tokens[since]
    assert tokens_per_s(snapshot) == pytest.approx(tokens / (snapshot.now_s - series.at_s[since]))
    assert tokens_per_s(EMPTY) == 0.0


def test_a_source_that_did_not_change_stays_the_same_object() -> None:
    views = Views()
    one, other = played()[1], played()[2]
    first = views.of(engines_view, one)
    assert views.of(engines_view, one) is first
    same = views.of(engines_view, replace(one, now_s=one.now_s + 1))
    assert same.sources["engines"] is first.sources["engines"]
    assert views.of(engines_view, other).sources["engines"] is not first.sources["engines"]


def test_a_tab_is_sent_only_what_changed() -> None:
    tab = PageTab()
    snapshot = played()[1]
    first = tab.show(snapshot)
    again = tab.show(replace(snapshot, taken_unix_s=0.0))
    assert first > 20_000
    assert again == 0
    assert 0 < tab.show(played()[2]) < 400_000


def test_phases_have_colours_of_different_luminance() -> None:
    def luminance(colour: str) -> float:
        """CIE L*."""
        rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        return float(116 * y ** (1 / 3) - 16)

    assert set(style.PHASE_COLOURS) == set(phases.PHASES)
    shades = sorted(luminance(colour) for colour in style.PHASE_COLOURS.values())
    assert min(np.diff(shades)) > 4.5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.0421, "0.042 s"),
        (0.9999, "1.0 s"),
        (59.96, "60.0 s"),
        (99.96, "1 min 40 s"),
        (3599.7, "1 h 00 min"),
    ],
)
def test_durations_as_text(seconds: float, text: str) -> None:
    assert style.duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (9_999, "9,999"),
        (12_345, "12.3 k"),
        (1_234_567, "1.23 M"),
        (999_999, "1 M"),
        (7.5e9, "7.5 G"),
    ],
)
def test_short_numbers(number: float, text: str) -> None:
    assert style.short(number) == text


@given(names=st.lists(st.text("ab-/", min_size=1, max_size=60), unique=True, max_size=20))
def test_shortened_names_stay_different(names: list[str]) -> None:
    assert len(set(style.elide(names))) == len(names)


def test_without_our_plugin_every_panel_says_so() -> None:
    for panel in PANELS:
        texts = [model.text for model in panel().root.select({"name": f"heddle-{panel.name}-heading"})]
        assert len(texts) == 1 and "no heddle plugin yet" in texts[0]


def test_a_tab_that_fails_stops_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        plugins: ClassVar[dict[str, Any]] = {"heddle": object()}

    page = OpenPage(Broken(), [])  # type: ignore[arg-type]
    page.update()
    page.update()
    assert [record.message for record in caplog.records] == ["a tab of the heddle page is not updated any more"]
