"""Actions and pools: CPUs that tools and rewards use, and the calls that wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import HoverTool, NumeralTickFormatter, Range1d

from heddle_dask.live.scheduler.dashboard import style
from heddle_dask.live.scheduler.dashboard.panel import Panel, RowLabels, html_block, label_rows, row_positions
from heddle_dask.live.scheduler.dashboard.view import View
from heddle_dask.views.history.run_snapshot import ActionView, PoolView, RunSnapshot

MOST_POOLS, MOST_ACTIONS = 8, 12
_LEGEND = (
    style.chip(style.FREE, "CPUs")
    + style.chip(style.RUNNING_TOOL, "in use")
    + style.chip(style.PHASE_COLOURS["tool queue"], "waiting actions")
)


def actions_view(snapshot: RunSnapshot) -> View:
    """Pools as bars, calls by label as a table."""
    pools = snapshot.pools[:MOST_POOLS]
    source = {"pools": _columns(pools)}
    if not snapshot.pools:
        return View("", source, "No tool worker has joined yet.", html="")
    hosts, cpus, free, waiting = (
        sum(getattr(each, name) for each in snapshot.pools) for name in ("hosts", "cpus", "free_cpus", "waiting")
    )
    heading = (
        f'<span class="sub"><b>{style.count(cpus - free)}</b> of {style.count(cpus)} CPUs in use on '
        f"{style.plural(hosts, 'host')}, <b>{style.count(waiting)}</b> waiting</span>"
        f"<div class='chips'>{_LEGEND}</div>"
    )
    return View(heading, source, rows=tuple(style.elide(each.pool for each in pools)), html=_table(snapshot.actions))


def _columns(pools: Sequence[PoolView]) -> dict[str, Any]:
    return {
        "row": row_positions(len(pools)),
        "pool": [each.pool for each in pools],
        "cpus": np.array([each.cpus for each in pools], dtype=float),
        "used": np.array([each.cpus - each.free_cpus for each in pools], dtype=float),
        "waiting_to": np.array([each.cpus + each.waiting for each in pools], dtype=float),
        "waiting": np.array([each.waiting for each in pools], dtype=float),
        "running": np.array([each.running for each in pools], dtype=float),
        "hosts": np.array([each.hosts for each in pools], dtype=float),
    }


def _table(actions: Sequence[ActionView]) -> str:
    if not actions:
        return '<div class="empty">No action yet.</div>'
    busiest = sorted(actions, key=lambda each: (-(each.running + each.waiting), -each.finished, each.label))
    rows = "".join(_row(each) for each in busiest[:MOST_ACTIONS])
    left = len(actions) - MOST_ACTIONS
    more = f'<div class="sub">and {style.plural(left, "more label")}</div>' if left > 0 else ""
    return (
        '<table><tr><th class="text">action</th><th>running</th><th>waiting</th><th>finished</th><th>failed</th>'
        f"<th>mean</th></tr>{rows}</table>{more}"
    )


def _row(action: ActionView) -> str:
    mean = style.duration(action.run_s / action.finished) if action.finished else "-"
    failed = f'<span class="bad">{style.count(action.failed)}</span>' if action.failed else "0"
    kind = "" if action.kind == "tool" else f' <span class="sub">({style.escape(action.kind)})</span>'
    name = style.escape(action.label or "without label")
    return (
        f'<tr><td class="text wide" title="{name}">{name}{kind}</td><td>{style.count(action.running)}</td>'
        f"<td>{style.count(action.waiting)}</td><td>{style.count(action.finished)}</td><td>{failed}</td><td>{mean}</td>"
        "</tr>"
    )


class ActionsPanel(Panel):
    """Bars of the pools, and a table of the calls."""

    title = "Actions and pools"
    name = "actions"
    make = staticmethod(actions_view)

    def body(self) -> Sequence[Any]:
        source = self.source("pools", list(_columns([])))
        self._rows, self._labels = Range1d(start=2, end=0), RowLabels()
        chart = self.chart("CPUs; behind them, waiting actions", "", y_range=self._rows, tools="", height=130)
        chart.sizing_mode = "stretch_width"
        chart.x_range.start = 0
        bars = {"y": "row", "source": source}
        room = chart.hbar(left=0, right="cpus", height=0.74, fill_color=style.FREE, line_color=style.EDGE, **bars)
        chart.hbar(left=0, right="used", height=0.54, fill_color=style.RUNNING_TOOL, line_color=None, **bars)
        chart.hbar(
            left="cpus",
            right="waiting_to",
            height=0.54,
            fill_color=style.PHASE_COLOURS["tool queue"],
            line_color=None,
            **bars,
        )
        chart.ygrid.visible = False
        chart.xaxis.formatter = NumeralTickFormatter(format="0,0")
        chart.xaxis.ticker.min_interval = 1
        tooltip = [
            ("pool", "@pool, @hosts{0,0} hosts"),
            ("CPUs", "@used{0,0} of @cpus{0,0} in use"),
            ("actions", "@running{0,0} running, @waiting{0,0} waiting"),
        ]
        chart.add_tools(HoverTool(tooltips=tooltip, renderers=[room]))
        label_rows(chart, self._labels)
        self._chart, self._table = chart, html_block("heddle-actions-table")
        return (chart, self._table)

    def adjust(self, view: View, before: View) -> None:
        if view.rows != before.rows:
            self._labels.show(view.rows)
            self._rows.start = max(len(view.rows), 1)
            self._chart.height = 70 + 26 * max(len(view.rows), 1)
