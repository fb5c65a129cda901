"""Timeline: what the longest trajectories and those that ended last do, second by second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import HoverTool, NumeralTickFormatter, Range1d

from heddle_dask.live.scheduler.dashboard import style
from heddle_dask.live.scheduler.dashboard.panel import Panel, RowLabels, label_rows, row_positions
from heddle_dask.live.scheduler.dashboard.view import View
from heddle_dask.views.history import phases
from heddle_dask.views.history.run_snapshot import RunSnapshot, TrajectoryView

MOST_ROWS = 32
# Of these rows, when there are enough of both.
ENDED_ROWS = 8
# Beyond this number of segments, those too short to be seen are drawn together.
MOST_SEGMENTS = 1500
FINEST_SHARE = 1 / 350

_SHOWN_PHASES = (
    "generating",
    "llm queue",
    "tool",
    "tool queue",
    "quota",
    "service load",
    "reward",
    "migration",
    "driver",
    "admission",
)
_LEGEND = style.phase_chips(_SHOWN_PHASES) + style.chip(style.TEXT, "end", "dot")
_LEGEND += style.chip(style.FAILURE, "end without completion", "dot")


def timeline_view(snapshot: RunSnapshot) -> View:
    """At most `MOST_ROWS` trajectories."""
    shown = shown_trajectories(snapshot)
    if not shown:
        why = "No trajectory yet." if snapshot.session else "No session is open."
        return View("", {"segments": _segments([], snapshot, 0.0), "ends": _NOWHERE}, why)
    labels = style.elide(each.trajectory_id for each in shown)
    rows = row_positions(len(shown))
    pieces = sum(len(each.segment_starts_s) for each in shown)
    began_s = min(_start(each) for each in shown)
    finest_s = (snapshot.now_s - began_s) * FINEST_SHARE if pieces > MOST_SEGMENTS else 0.0
    live = sum(each.ended_s is None for each in shown)
    alive = sum(snapshot.counts.by_phase.values())
    ended = sum(snapshot.counts.ended.values())
    heading = (
        f'<span class="sub">the longest <b>{style.count(live)}</b> of {style.count(alive)} trajectories that have not '
        f"ended, longest first; the latest <b>{style.count(len(shown) - live)}</b> of {style.count(ended)} that have"
        f"</span><div class='chips'>{_LEGEND}</div>"
    )
    sources = {"segments": _segments(shown, snapshot, finest_s), "ends": _ends(shown, list(rows))}
    return View(heading, sources, rows=tuple(labels))


def shown_trajectories(snapshot: RunSnapshot) -> list[TrajectoryView]:
    """The longest live trajectories, then those that ended last."""
    ended = snapshot.latest_ended[: max(ENDED_ROWS, MOST_ROWS - len(snapshot.longest))]
    return [*snapshot.longest[: MOST_ROWS - len(ended)], *ended]


def _start(trajectory: TrajectoryView) -> float:
    return trajectory.segment_starts_s[0] if trajectory.segment_starts_s else trajectory.submitted_s


Segment = tuple[float, float, int, int]
"""Begin, end, phase and engine."""


def merged_segments(trajectory: TrajectoryView, now_s: float, finest_s: float) -> list[Segment]:
    """The segments of a trajectory; neighbours shorter than `finest_s` are one, of what takes most of its time."""
    ends_s = (*trajectory.segment_starts_s[1:], now_s if trajectory.ended_s is None else trajectory.ended_s)
    columns = (trajectory.segment_starts_s, ends_s, trajectory.segment_phases, trajectory.segment_engines)
    found: list[Segment] = []
    tiny: list[Segment] = []
    for segment in zip(*columns, strict=True):
        is_tiny = segment[1] - segment[0] < finest_s
        if is_tiny:
            tiny.append(segment)
        if tiny and (not is_tiny or segment[1] - tiny[0][0] >= finest_s):
            _append(found, _as_one(tiny))
            tiny = []
        if not is_tiny:
            _append(found, segment)
    if tiny:
        _append(found, _as_one(tiny))
    return found


def _as_one(tiny: Sequence[Segment]) -> Segment:
    seconds: dict[tuple[int, int], float] = {}
    for begin_s, end_s, phase, engine in tiny:
        seconds[phase, engine] = seconds.get((phase, engine), 0.0) + end_s - begin_s
    most = max(seconds, key=lambda kind: seconds[kind])
    return (tiny[0][0], tiny[-1][1], *most)


def _append(found: list[Segment], segment: Segment) -> None:
    if found and found[-1][2:] == segment[2:]:
        found[-1] = (found[-1][0], *segment[1:])
    else:
        found.append(segment)


def _segments(shown: Sequence[TrajectoryView], snapshot: RunSnapshot, finest_s: float) -> dict[str, Any]:
    names = {engine.index: engine.engine_id for engine in snapshot.engines}
    rows: list[tuple[int, TrajectoryView, Segment]] = [
        (number, each, segment)
        for number, each in enumerate(shown)
        for segment in merged_segments(each, snapshot.now_s, finest_s)
    ]
    kinds = [phases.PHASES[segment[2]] for _, _, segment in rows]
    return {
        "row": np.array([number + 0.5 for number, _, _ in rows], dtype=float),
        "left": np.array([segment[0] for _, _, segment in rows], dtype=float),
        "right": np.array([segment[1] for _, _, segment in rows], dtype=float),
        "colour": [style.PHASE_COLOURS[kind] for kind in kinds],
        "phase": [style.PHASE_LABELS[kind] for kind in kinds],
        "lasted": [style.duration(segment[1] - segment[0]) for _, _, segment in rows],
        "engine": [names.get(segment[3], "none") for _, _, segment in rows],
        "trajectory": [each.trajectory_id for _, each, _ in rows],
        "state": [_state(each) for _, each, _ in rows],
    }


def _state(trajectory: TrajectoryView) -> str:
    done = (
        f"{style.plural(trajectory.steps, 'step')}, {style.count(trajectory.generated_tokens)} tokens, "
        f"{style.plural(trajectory.moves, 'move')}, {style.plural(trajectory.preemptions, 'preemption')}"
    )
    if trajectory.ended_s is not None:
        return f"{done}; {trajectory.status}" + (f": {trajectory.cause}" if trajectory.cause else "")
    if trajectory.remaining_tokens is None:
        return done
    return f"{done}; about {style.short(trajectory.remaining_tokens)} tokens to come"


def _ends(shown: Sequence[TrajectoryView], rows: Sequence[float]) -> dict[str, Any]:
    ended = [(row, each) for row, each in zip(rows, shown, strict=True) if each.ended_s is not None]
    return {
        "row": np.array([row for row, _ in ended], dtype=float),
        "at": np.array([each.ended_s for _, each in ended], dtype=float),
        "colour": [style.TEXT if each.status == "completed" else style.FAILURE for _, each in ended],
    }


# Above the chart: an axis of time needs one point, or the browser warns.
_NOWHERE = {"row": np.array([-1.0]), "at": np.array([0.0]), "colour": [style.TEXT]}


class TimelinePanel(Panel):
    """One row per trajectory."""

    title = "Timeline"
    name = "timeline"
    make = staticmethod(timeline_view)

    def body(self) -> Sequence[Any]:
        segments = self.source("segments", ["row", "left", "right", "colour"])
        ends = self.source("ends", list(_NOWHERE))
        ends.data = dict(_NOWHERE)
        self._rows, self._labels = Range1d(start=12, end=0), RowLabels()
        chart = self.chart("seconds since the session began", "", y_range=self._rows)
        drawn = chart.hbar(
            y="row",
            left="left",
            right="right",
            height=0.78,
            fill_color="colour",
            line_color=None,
            hover_line_color=style.TEXT,
            source=segments,
        )
        chart.scatter("at", "row", fill_color="colour", line_color="white", size=7, source=ends)
        chart.x_range.range_padding = 0.01
        chart.xaxis.formatter = NumeralTickFormatter(format="0,0.[0]")
        chart.ygrid.visible = False
        chart.add_tools(HoverTool(tooltips=_TOOLTIP, renderers=[drawn]))
        label_rows(chart, self._labels)
        return (chart,)

    def adjust(self, view: View, before: View) -> None:
        if view.rows != before.rows:
            self._labels.show(view.rows)
            self._rows.start = max(len(view.rows), 12)


_TOOLTIP = [
    ("trajectory", "@trajectory"),
    ("phase", "@phase, @lasted, from @left{0,0.0} s"),
    ("engine", "@engine"),
    ("so far", "@state"),
]
