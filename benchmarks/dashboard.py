"""What the page of the dashboard costs the scheduler: seconds for each picture, and for each open tab.

A simulated rollout with slots for all its trajectories is played second by second, from the moment at which the first
twentieth of them has ended, to the code that serves a tab: the picture is taken, the views are made, and a Bokeh
document is updated. Every message of it is serialized as for the browser, and not sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.dashboard_demo import PlayedRun
from benchmarks.dashboard_run import simulated_run
from benchmarks.page_tab import PageTab
from benchmarks.tables import Column
from heddle_dask.engines.collector import collect_seldom

UPDATES = 60


@dataclass(frozen=True, slots=True)
class DashboardRow:
    """One size.

    Attributes
    ----------
    live
        Trajectories that are admitted and have not ended, on average over the updates.
    picture_ms, views_ms
        Milliseconds of CPU for one picture and for the views of it: once per second, however many tabs are open.
    tab_ms, tab_kib
        The same for one open tab, and the bytes that it is sent.
    one_tab_ms_per_s, ten_tabs_ms_per_s
        Milliseconds of the scheduler in each second with one tab open, and with ten.
    worst_ms
        The longest single update with one tab.
    """

    trajectories: int
    live: float
    events: int
    updates: int
    picture_ms: float
    views_ms: float
    tab_ms: float
    tab_kib: float
    one_tab_ms_per_s: float
    ten_tabs_ms_per_s: float
    worst_ms: float


def measure_dashboard(sizes: Sequence[int], *, seed: int) -> Iterator[DashboardRow]:
    """A row per number of trajectories."""
    collect_seldom()  # as the scheduler does
    for size in sizes:
        yield _measure(size, seed)


def _measure(trajectories: int, seed: int) -> DashboardRow:
    run = PlayedRun(simulated_run(trajectories, seed, live_share=1.0), lambda: 0.0)
    begin_s = run.ended_s(0.05)
    tab = PageTab()
    tab.show(run.at(begin_s))
    live: list[int] = []
    picture_s: list[float] = []
    views_s: list[float] = []
    tab_s: list[float] = []
    sent_bytes: list[int] = []
    for number in range(1, UPDATES + 1):
        run.advance(begin_s + number)
        began_s = time.process_time()
        snapshot = run.at(begin_s + number)
        taken_s = time.process_time()
        tab.make_views(snapshot)
        made_s = time.process_time()
        sent_bytes.append(tab.show(snapshot))
        shown_s = time.process_time()
        picture_s.append(taken_s - began_s)
        views_s.append(made_s - taken_s)
        tab_s.append(shown_s - made_s)
        live.append(snapshot.counts.live)
    shared_s, one_s = fmean(picture_s) + fmean(views_s), fmean(tab_s)
    return DashboardRow(
        trajectories=trajectories,
        live=round(fmean(live), 1),
        events=run.history.events,
        updates=UPDATES,
        picture_ms=round(1e3 * fmean(picture_s), 2),
        views_ms=round(1e3 * fmean(views_s), 2),
        tab_ms=round(1e3 * one_s, 2),
        tab_kib=round(fmean(sent_bytes) / 1024, 1),
        one_tab_ms_per_s=round(1e3 * (shared_s + one_s), 2),
        ten_tabs_ms_per_s=round(1e3 * (shared_s + 10 * one_s), 2),
        worst_ms=round(1e3 * max(sum(each) for each in zip(picture_s, views_s, tab_s, strict=True)), 2),
    )


COLUMNS: Sequence[Column] = (
    ("trajectories", lambda row: str(row.trajectories)),
    ("live", lambda row: f"{row.live:.0f}"),
    ("events", lambda row: str(row.events)),
    ("picture ms", lambda row: f"{row.picture_ms:.2f}"),
    ("views ms", lambda row: f"{row.views_ms:.2f}"),
    ("tab ms", lambda row: f"{row.tab_ms:.2f}"),
    ("tab KiB", lambda row: f"{row.tab_kib:.1f}"),
    ("one tab ms/s", lambda row: f"{row.one_tab_ms_per_s:.1f}"),
    ("ten tabs ms/s", lambda row: f"{row.ten_tabs_ms_per_s:.1f}"),
    ("worst ms", lambda row: f"{row.worst_ms:.1f}"),
)
