"""Migrations and preemptions: how many over time, and what the moves cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import HoverTool, NumeralTickFormatter

from heddle_dask.live.scheduler.dashboard import style
from heddle_dask.live.scheduler.dashboard.panel import Panel, html_block
from heddle_dask.live.scheduler.dashboard.view import View
from heddle_dask.views.history.run_snapshot import MoveView, RunSnapshot

_LEGEND = style.chip(style.MOVE, "moves started", "dot") + style.chip(style.QUEUED, "preemptions", "dot")


def moves_view(snapshot: RunSnapshot) -> View:
    """Totals over time, and moves by kind."""
    moves = sorted(snapshot.moves, key=lambda each: each.kind)
    started, running = sum(each.started for each in moves), sum(each.running for each in moves)
    preemptions = snapshot.counts.preemptions
    series = snapshot.series
    now = [max(snapshot.now_s, snapshot.at_s)] if snapshot.session else []
    columns = {
        "at": np.array([*series.at_s, *now], dtype=float),
        "moves": np.array([*series.moves, *[started] * len(now)], dtype=float),
        "preemptions": np.array([*series.preemptions, *[preemptions] * len(now)], dtype=float),
    }
    heading = (
        f'<span class="sub"><b>{style.count(started)}</b> moves started, <b>{style.count(running)}</b> running; '
        f"<b>{style.count(preemptions)}</b> preemptions; not by the strategy: "
        f"<b>{style.count(sum(each.from_leaving for each in moves))}</b> moves from engines that leave, "
        f"<b>{style.count(snapshot.counts.requeues)}</b> steps queued again</span><div class='chips'>{_LEGEND}</div>"
    )
    if not started and not preemptions:
        why = "No move and no preemption yet." if snapshot.session else "No session is open."
        return View(heading if snapshot.session else "", {"totals": columns}, why)
    return View(heading, {"totals": columns}, html=_table(moves) if moves else "")


def _table(moves: Sequence[MoveView]) -> str:
    rows = "".join(_row(each) for each in moves)
    return (
        '<table><tr><th class="text">moves by</th><th>ended</th><th>failed</th><th>tokens</th><th>mean</th>'
        f'<th title="steps that waited for the end of their move">waited for</th><th>exposed</th></tr>{rows}</table>'
    )


def _row(move: MoveView) -> str:
    ended = move.started - move.running
    mean = style.duration(move.seconds / ended) if ended > 0 else "-"
    failed = f'<span class="bad">{style.count(move.failed)}</span>' if move.failed else "0"
    return (
        f'<tr><td class="text">{style.escape(move.kind)}</td><td>{style.count(ended)}</td><td>{failed}</td>'
        f"<td>{style.short(move.tokens)}</td><td>{mean}</td><td>{style.count(move.exposed)}</td>"
        f"<td>{style.duration(move.exposed_s) if move.exposed_s else '0 s'}</td></tr>"
    )


class MovesPanel(Panel):
    """Totals over time, and a table of the moves."""

    title = "Migrations and preemptions"
    name = "moves"
    make = staticmethod(moves_view)

    def body(self) -> Sequence[Any]:
        source = self.source("totals", ["at", "moves", "preemptions"])
        chart = self.chart("seconds since the session began", "total so far")
        for name, colour in (("moves", style.MOVE), ("preemptions", style.QUEUED)):
            chart.step("at", name, mode="after", line_color=colour, line_width=2.5, source=source)
        hidden = chart.line("at", "moves", line_alpha=0.0, source=source)
        chart.y_range.start = 0
        chart.x_range.range_padding = 0.0
        chart.xaxis.formatter = NumeralTickFormatter(format="0,0.[0]")
        chart.yaxis.formatter = NumeralTickFormatter(format="0,0")
        chart.yaxis.ticker.min_interval = 1
        tooltip = [("at", "@at{0,0.0} s"), ("moves", "@moves{0,0}"), ("preemptions", "@preemptions{0,0}")]
        chart.add_tools(HoverTool(tooltips=tooltip, renderers=[hidden], mode="vline"))
        self._table = html_block("heddle-moves-table")
        return (chart, self._table)
