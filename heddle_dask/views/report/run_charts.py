"""Sections of a run's report over time: seconds, the longest, the timeline, live trajectories, engines, pools."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from html import escape

import numpy as np

from heddle_dask.views.accounts import NS_PER_S, PHASE_TEXT, PHASE_TITLE, Phase
from heddle_dask.views.drawing.colours import SERIES, colour
from heddle_dask.views.drawing.page import figure, section, table
from heddle_dask.views.drawing.svg import heat_map
from heddle_dask.views.drawing.svg_runs import (
    TimelineRow,
    TimeMark,
    area_chart,
    on_axis,
    phase_bar,
    phase_legend,
    timeline,
)
from heddle_dask.views.report.intervals import Floats, Intervals, edges_of
from heddle_dask.views.report.reasons import shown_s, why_last
from heddle_dask.views.report.run_figures import ActionUse, Axis, EngineUse, RunFigures, session_offset_s

AREA_CELLS, HEAT_CELLS = 400, 120
HEAT_ROWS = 48
LONGEST_SHOWN = 20
_NO_TIME = '<p class="soft">No trajectory can be placed on an axis of time.</p>'


class RunAxis:
    def __init__(self, figures: RunFigures) -> None:
        self.axis = Axis.of(figures.rows)
        self._figures = figures

    @property
    def until_s(self) -> float:
        return self.axis.until_s

    def means(self, intervals: Mapping[int, Intervals], cells: int) -> Floats:
        edges = edges_of(self.until_s, cells)
        total: Floats = np.zeros(cells)
        for session, mine in intervals.items():
            if session in self.axis.places_s:
                # The edges by the session's clock; beyond its phase of the axis nothing of it counts.
                inside = np.clip(edges, self.axis.places_s[session], self.axis.ends(session))
                shift_s = self.axis.begins_s[session] - self.axis.places_s[session]
                widths = np.diff(edges)
                total += mine.means(inside + shift_s) * np.diff(inside) / widths
        return total

    def at_journal_time(self, session: int, seconds: float) -> float | None:
        """The place of a time of a session's journal; None where it cannot be told."""
        offset_s = session_offset_s(self._figures, session)
        if offset_s is None or session not in self.axis.places_s:
            return None
        return self.axis.at(session, seconds + offset_s)

    def marks(self) -> list[TimeMark]:
        """Where sessions begin after the first, and where engines were lost."""
        marks = [
            TimeMark(place, f"session {number + 1}")
            for number, place in enumerate(self.axis.places_s.values())
            if number
        ]
        for session, facts in enumerate(self._figures.sessions):
            for engine in facts.engines.values():
                at = None if math.isnan(engine.lost_s) else self.at_journal_time(session, engine.lost_s)
                # Engines that end with their run are no event of it.
                if at is not None and 0 <= at < 0.995 * self.until_s:
                    marks.append(TimeMark(at, f"{engine_name(engine.engine_id)} lost"))
        return marks[:40]


def engine_name(engine_id: str) -> str:
    """The worker's name; an incarnation has more."""
    return engine_id.partition("/")[0]


def seconds_section(figures: RunFigures) -> str:
    total_ns = sum(figures.totals_ns.values())
    count = len(figures.rows)
    if not total_ns:
        return section("Where each second went", '<p class="soft">No trajectory took any time.</p>')
    order = list(Phase)
    rows = []
    for phase in PHASE_TITLE:
        length = figures.totals_ns[phase]
        if not length:
            continue
        place = order.index(phase)
        each = [row.phases_ns[place] / NS_PER_S for row in figures.rows]
        rows.append(
            [
                f'<i style="background:{colour(phase)}"></i>{PHASE_TITLE[phase]}',
                f"{length / NS_PER_S:,.1f}",
                f"{length / total_ns:.1%}",
                f"{length / NS_PER_S / count:,.2f}",
                f"{statistics.median(each):,.2f}",
                f"{max(each):,.2f}",
                escape(PHASE_TEXT[phase]),
            ]
        )
    rows.append(["total", f"{total_ns / NS_PER_S:,.1f}", "100.0%", f"{total_ns / NS_PER_S / count:,.2f}", "", "", ""])
    head = ["phase", "seconds", "share", "mean", "median", "most", "meaning"]
    return section(
        "Where each second went",
        f"<p>The time of all {count:,} trajectories from submission to end, each instant counted once. Where one does "
        "several things at a time, work counts before waiting.</p>",
        figure(phase_bar(figures.totals_ns, of_ns=total_ns, width=1240, height=22)),
        table(head, rows, texts=(0, 6)),
    )


def longest_section(figures: RunFigures) -> str:
    longest = figures.longest[:LONGEST_SHOWN]
    if not longest:
        return ""
    typical = figures.typical
    most_ns = longest[0].row.duration_ns
    rows = [
        [
            f"<code>{escape(shown.row.trajectory_id)}</code>",
            shown_s(shown.account.duration_s),
            phase_bar(shown.account.phases_ns, of_ns=most_ns, width=380),
            escape(why_last(shown.record, shown.account, typical, shown.row.losses)),
            escape(shown.row.status),
        ]
        for shown in longest
    ]
    median_s = statistics.median(row.duration_ns for row in figures.rows) / NS_PER_S
    used = [phase for phase in PHASE_TITLE if any(shown.account.phases_ns.get(phase) for shown in longest)]
    return section(
        "The longest trajectories",
        f"<p>The median trajectory took {shown_s(median_s)}. The reason is what a trajectory spent beyond the median "
        "of all in the same phase.</p>",
        phase_legend(used),
        table(["trajectory", "took", "where", "why it ended last", "status"], rows, texts=(0, 2, 3, 4)),
    )


def timeline_section(figures: RunFigures, axis: RunAxis) -> str:
    drawn = [shown for shown in figures.drawn if shown.row.session is not None]
    if not drawn or axis.until_s <= 0:
        return section("Timeline of trajectories", _NO_TIME)
    rows = []
    for shown in drawn:
        session = shown.row.session or 0
        shift_s = axis.axis.at(session, 0.0)
        title = f"{shown.row.trajectory_id}: {shown.row.status}, {shown.account.duration_s:,.2f} s"
        rows.append(TimelineRow(shown.row.trajectory_id, title, on_axis(shown.account.segments, shift_s)))
    used = [phase for phase in PHASE_TITLE if any(phase is each for row in rows for _, _, each in row.segments)]
    which = (
        f"All {len(rows)} trajectories"
        if len(rows) == len(figures.rows)
        else f"{len(rows)} of {len(figures.rows):,} trajectories: the {len(figures.longest)} longest and an even sample"
    )
    return section(
        "Timeline of trajectories",
        phase_legend(used),
        figure(
            timeline(rows, until_s=axis.until_s, marks=axis.marks()),
            f"{which}, in the order of their start. Dashed lines: lost engines, and the begin of a further session. "
            f"Within a step, the wait stands before the work, also where preemptions mixed them.{_resumed(axis)}",
        ),
    )


def live_section(figures: RunFigures, axis: RunAxis) -> str:
    if axis.until_s <= 0:
        return section("Live trajectories and the tail", _NO_TIME)
    series = []
    # What works lies at the bottom, what waits above: the height of the work is the use that the run makes of engines.
    for phase in (*(each for each in Phase if each is not Phase.ADMISSION), Phase.ADMISSION):
        by_session = {session: mine for (session, each), mine in figures.states.items() if each is phase}
        if by_session:
            means = axis.means(by_session, AREA_CELLS)
            series.append((PHASE_TITLE[phase], colour(phase), means.tolist()))
    used = [phase for phase in PHASE_TITLE if any(each is phase for _, each in figures.states)]
    return section(
        "Live trajectories and the tail",
        phase_legend(used),
        figure(
            area_chart(series, until_s=axis.until_s, y_label="trajectories", marks=axis.marks()),
            f"Trajectories by what they do. {_tail(figures, axis)}{_resumed(axis)}",
        ),
    )


def _resumed(axis: RunAxis) -> str:
    if len(axis.axis.places_s) <= 1:
        return ""
    return " A trajectory is drawn in the session that ended it; what an earlier session did of it is not shown."


def _tail(figures: RunFigures, axis: RunAxis) -> str:
    ends = sorted(axis.axis.at(row.session, row.end_s) for row in figures.rows if row.session is not None)
    if len(ends) < 10 or len(axis.axis.places_s) > 1:
        return ""
    at = ends[math.ceil(0.9 * len(ends)) - 1]
    tail_s = axis.until_s - at
    return (
        f"The tail: 90 % of the trajectories had ended after {shown_s(at)}; the last 10 % took another "
        f"{shown_s(tail_s)}, {tail_s / axis.until_s:.0%} of the makespan."
    )


def engines_section(figures: RunFigures, axis: RunAxis) -> str:
    """Engines over time, from the records of steps."""
    if axis.until_s <= 0 or not figures.engines:
        return section("Engines over time", _NO_TIME)
    by_engine: dict[str, dict[int, EngineUse]] = {}
    for (session, engine_id), use in figures.engines.items():
        by_engine.setdefault(engine_id, {})[session] = use
    names = sorted(by_engine)
    shown = names if len(names) <= HEAT_ROWS else [names[i * len(names) // HEAT_ROWS] for i in range(HEAT_ROWS)]
    maps = [
        ("Running steps", "running", "running steps"),
        ("Queued steps", "queued", "steps that wait for the engine"),
        ("Contexts held", "held", "context tokens of live trajectories"),
    ]
    charts = []
    for title, name, unit in maps:
        rows = []
        for engine_id in shown:
            intervals = {session: getattr(use, name) for session, use in by_engine[engine_id].items()}
            rows.append((engine_name(engine_id), axis.means(intervals, HEAT_CELLS).tolist()))
        most = max((value for _, cells in rows for value in cells), default=0.0)
        chart = heat_map(rows, most=most, x_most_s=axis.until_s, unit=unit)
        charts.append(section(title, figure(chart), level=3))
    sampled = "" if len(shown) == len(names) else f" {len(shown)} of {len(names)} engines, evenly chosen."
    return section(
        "Engines over time",
        "<p>From the records of finished steps: a step counts at the engine that ended it. The tokens held are those "
        "of the contexts whose last step ran there; what the engine has evicted of them is not known. Idle seconds are "
        f"those without a step while a step waited elsewhere.{sampled}</p>",
        f'<div class="side">{"".join(charts)}</div>',
        _engine_table(figures, by_engine),
    )


def _engine_table(figures: RunFigures, by_engine: Mapping[str, Mapping[int, EngineUse]]) -> str:
    known = {name: facts for session in figures.sessions for name, facts in session.engines.items()}
    rows = []
    for engine_id in sorted(by_engine.keys() | known):
        uses = list(by_engine.get(engine_id, {}).values())
        idle_s = sum(session.idle.seconds(engine_id) for session in figures.sessions)
        busy_s = sum(use.running.total() for use in uses)
        prompt = sum(use.prompt_tokens for use in uses)
        cached = sum(use.cached_tokens for use in uses)
        facts = known.get(engine_id)
        rows.append(
            [
                f"<code>{escape(engine_id)}</code>",
                str(facts.slots) if facts else "",
                str(facts.tp_degree) if facts else "",
                f"{sum(use.steps for use in uses):,}",
                f"{sum(use.tokens for use in uses):,}",
                f"{busy_s:,.1f}",
                f"{idle_s:,.1f}" if facts else "",
                f"{cached / prompt:.0%}" if prompt else "",
                escape(facts.reason) if facts else "",
            ]
        )
    head = ["engine", "slots", "TP", "steps", "tokens", "step seconds", "idle s", "prompt cached", "ended"]
    shown = table(head, rows, texts=(0, 8))
    return shown if len(rows) <= 12 else f"<details><summary>{len(rows)} engines</summary>{shown}</details>"


def pools_section(figures: RunFigures, axis: RunAxis) -> str:
    if not figures.actions:
        return section("Actions and pools", '<p class="soft">No action was called.</p>')
    parts = []
    if axis.until_s > 0 and figures.running_actions:
        series = [
            ("running", SERIES[2], axis.means(figures.running_actions, AREA_CELLS).tolist()),
            ("waiting", SERIES[4], axis.means(figures.queued_actions, AREA_CELLS).tolist()),
        ]
        parts.append(
            figure(
                area_chart(series, until_s=axis.until_s, y_label="actions", height=220),
                f"Actions that run (green) and wait (orange). {_pool_text(figures)}",
            )
        )
    rows = [_action_row(label, use) for label, use in sorted(figures.actions.items(), key=lambda item: -item[1].cpu_s)]
    head = [
        *("action", "kind", "calls", "not ok", "run mean", "run p99", "wait mean", "wait p99"),
        *("of it for quotas", "of it for loading", "CPU seconds"),
    ]
    return section("Actions and pools", *parts, table(head, rows, texts=(0, 1, 3)))


def _pool_text(figures: RunFigures) -> str:
    cpus = [sum(host.cpus for host in session.hosts.values()) for session in figures.sessions]
    hosts = [len(session.hosts) for session in figures.sessions]
    if not any(hosts):
        return ""
    return f"Tool workers seen: {max(hosts)}, with {max(cpus)} CPUs together."


def _action_row(label: str, use: ActionUse) -> list[str]:
    return [
        f"<code>{escape(label)}</code>",
        escape(use.kind),
        f"{sum(use.statuses.values()):,}",
        escape(", ".join(f"{count:,} {status}" for status, count in sorted(use.statuses.items()) if status != "ok")),
        *_mean_and_p99(use.run_s),
        *_mean_and_p99(use.queue_s),
        _mean_and_p99(use.quota_s)[0],
        _mean_and_p99(use.load_s)[0],
        f"{use.cpu_s:,.1f}",
    ]


def _mean_and_p99(seconds: Iterable[float]) -> tuple[str, str]:
    known = sorted(each for each in seconds if not math.isnan(each))
    if not known:
        return "", ""
    return shown_s(statistics.fmean(known)), shown_s(known[math.ceil(0.99 * len(known)) - 1])
