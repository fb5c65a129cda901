"""Live trajectories over time: what they do, how full the slots are, and the tail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import HoverTool, NumeralTickFormatter

from heddle_dask.live.scheduler.dashboard import style
from heddle_dask.live.scheduler.dashboard.panel import Panel, html_block
from heddle_dask.live.scheduler.dashboard.view import View
from heddle_dask.views.history import phases
from heddle_dask.views.history.engine_history import LIVING
from heddle_dask.views.history.run_snapshot import RunSnapshot

# From the bottom: below the dashed line of slots, everything that does not generate is an idle slot.
STACKED = (
    "generating",
    "migration",
    "llm queue",
    "tool",
    "reward",
    "tool queue",
    "quota",
    "service load",
    "driver",
)
TAIL_SHARE = 0.1
# Counts jump. With more samples than this, the slope between two of them is too steep to be seen.
DRAWN_AS_STEPS = 150
_LEGEND = style.phase_chips(STACKED) + style.chip(style.TEXT, "slots", "line")
_PROGRESS_LEGEND = (
    style.chip(style.ENDED, "ended")
    + style.chip(style.LIVE, "live")
    + style.chip(style.PHASE_COLOURS["admission"], "wait for admission")
)


def live_view(snapshot: RunSnapshot) -> View:
    series = series_until_now(snapshot)
    if not snapshot.counts.submitted:
        why = "No trajectory yet." if snapshot.session else "No session is open."
        return View("", {"series": series}, why)
    peak = max((int(each) for each in series["live"]), default=0)
    heading = (
        f'<span class="sub"><b>{style.count(snapshot.counts.live)}</b> live, {style.count(peak)} at most'
        f"{_tail_text(snapshot)}</span><div class='chips'>{_LEGEND}</div>"
    )
    return View(heading, {"series": series})


def series_until_now(snapshot: RunSnapshot) -> dict[str, Any]:
    """The samples as columns, and the counts of the snapshot as the last one."""
    series, counts = snapshot.series, snapshot.counts
    slots = sum(engine.slots for engine in snapshot.engines if engine.state in LIVING)
    here = dict(zip(phases.PHASES, series.by_phase, strict=True)) if series.by_phase else {}
    now = [max(snapshot.now_s, snapshot.at_s)] if snapshot.session else []

    def until_now(samples: Sequence[int], latest: int) -> Any:
        return np.array([*samples, latest] if now else list(samples), dtype=float)

    columns: dict[str, Any] = {
        _column(name): until_now(here.get(name, ()), counts.by_phase.get(name, 0)) for name in phases.PHASES
    }
    columns |= {
        "at": np.array([*series.at_s, *now], dtype=float),
        "live": until_now(series.live, counts.live),
        "ended": until_now(series.ended, sum(counts.ended.values())),
        "slots": until_now(series.slots, slots),
    }
    return as_steps(columns) if 1 < len(columns["at"]) <= DRAWN_AS_STEPS else columns


def as_steps(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns with two points per change, so that lines between points are steps."""
    return {
        name: np.repeat(column, 2)[1:] if name == "at" else np.repeat(column, 2)[:-1]
        for name, column in columns.items()
    }


def tail_began_s(snapshot: RunSnapshot) -> float | None:
    """When all but `TAIL_SHARE` of the trajectories submitted so far had ended; None before."""
    if not snapshot.counts.submitted:
        return None
    needed = snapshot.counts.submitted * (1 - TAIL_SHARE)
    for at_s, ended in zip(snapshot.series.at_s, snapshot.series.ended, strict=True):
        if ended >= needed:
            return at_s
    return None


def _tail_text(snapshot: RunSnapshot) -> str:
    began_s = tail_began_s(snapshot)
    if began_s is None:
        return ""
    over = sum(snapshot.counts.ended.values()) >= snapshot.counts.submitted
    until_s = snapshot.at_s if over else snapshot.now_s
    lasted_s = max(0.0, until_s - began_s)
    share = lasted_s / until_s if until_s > 0 else 0.0
    verb = "took" if over else "take, so far,"
    return f"; the last {TAIL_SHARE:.0%} of the trajectories {verb} <b>{style.duration(lasted_s)}</b> ({share:.0%})"


def _column(phase: str) -> str:
    return phase.replace(" ", "_")


class LivePanel(Panel):
    """Progress of all trajectories above, phases of the live ones below."""

    title = "Live trajectories"
    name = "live"
    make = staticmethod(live_view)

    def body(self) -> Sequence[Any]:
        columns = [_column(name) for name in phases.PHASES] + ["at", "live", "ended", "slots"]
        source = self.source("series", columns)
        live = self.chart("seconds since the session began", "live trajectories")
        stacked = [_column(name) for name in STACKED]
        colours = [style.PHASE_COLOURS[name] for name in STACKED]
        live.varea_stack(stacked, x="at", color=colours, source=source)
        live.step(
            "at",
            "slots",
            mode="after",
            line_color=style.TEXT,
            line_dash="dashed",
            line_width=2,
            source=source,
        )
        hidden = live.line("at", "live", line_alpha=0.0, source=source)
        progress = self.chart("", "trajectories", x_range=live.x_range, min_height=70, height=70)
        progress.sizing_mode = "stretch_width"
        progress.varea_stack(
            ["ended", "live", "admission"],
            x="at",
            color=[style.ENDED, style.LIVE, style.PHASE_COLOURS["admission"]],
            source=source,
        )
        over = progress.line("at", "ended", line_alpha=0.0, source=source)
        progress.xaxis.major_label_text_font_size = "0px"
        progress.yaxis.ticker.desired_num_ticks = 3
        for chart in (live, progress):
            chart.y_range.start = 0
            chart.x_range.range_padding = 0.0
            chart.xaxis.formatter = NumeralTickFormatter(format="0,0.[0]")
            chart.yaxis.formatter = NumeralTickFormatter(format="0,0")
            chart.yaxis.ticker.min_interval = 1
            chart.min_border_left = 64
        lines = [(style.PHASE_LABELS[name], f"@{_column(name)}{{0,0}}") for name in STACKED]
        at = ("at", "@at{0,0.0} s")
        slots = ("slots", "@slots{0,0}")
        live.add_tools(HoverTool(tooltips=[at, *lines, slots], renderers=[hidden], mode="vline"))
        totals = [("ended", "@ended{0,0}"), ("live", "@live{0,0}"), ("wait for admission", "@admission{0,0}")]
        progress.add_tools(HoverTool(tooltips=[at, *totals], renderers=[over], mode="vline"))
        legend = html_block("heddle-live-progress-legend")
        legend.text = f"<div class='chips'>{_PROGRESS_LEGEND}</div>"
        return (live, legend, progress)
