"""Failures by cause: what failed, why, how often, and when last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heddle_dask.live.scheduler.dashboard import style
from heddle_dask.live.scheduler.dashboard.panel import Panel, html_block
from heddle_dask.live.scheduler.dashboard.view import View
from heddle_dask.views.history.run_snapshot import FailureView, RunSnapshot

MOST_ROWS = 14


def failures_view(snapshot: RunSnapshot) -> View:
    failures = sorted(snapshot.failures, key=lambda each: (-each.count, each.boundary, each.cause))
    statuses = sorted(snapshot.counts.ended.items())
    ended = ", ".join(f"<b>{style.count(number)}</b> {style.escape(status)}" for status, number in statuses)
    heading = f'<span class="sub">trajectories that ended: {ended or "none"}</span>'
    if not failures:
        return View(heading, html='<div class="empty">Nothing has failed.</div>')
    largest = failures[0].count
    rows = "".join(_row(each, largest, snapshot.now_s) for each in failures[:MOST_ROWS])
    rest = failures[MOST_ROWS:]
    more = (
        f'<div class="sub">and {style.plural(len(rest), "more cause")} with '
        f"{style.plural(sum(each.count for each in rest), 'failure')}</div>"
        if rest
        else ""
    )
    table = (
        '<table><tr><th class="text">what</th><th class="text">cause</th><th>number</th><th></th><th>latest</th></tr>'
        f"{rows}</table>{more}"
    )
    return View(heading, html=table)


def _row(failure: FailureView, largest: int, now_s: float) -> str:
    cause, what = style.escape(failure.cause or "unknown"), style.escape(failure.boundary)
    message = style.escape(failure.message)
    line = f'<div class="sub" title="{message}">{message}</div>' if message else ""
    width = max(2.0, 100.0 * failure.count / largest)
    ago_s = max(0, round(now_s - failure.latest_s))
    ago = f"{ago_s} s" if ago_s < 100 else style.duration(ago_s)
    return (
        f'<tr><td class="text">{what}</td><td class="text wide" title="{cause}">{cause}{line}</td>'
        f'<td data-cause="{cause}" data-boundary="{what}" data-value="{failure.count}">{style.count(failure.count)}'
        f'</td><td class="bar text"><i style="width:{width:.0f}%;background:{style.FAILURE}"></i></td>'
        f"<td>{ago} ago</td></tr>"
    )


class FailuresPanel(Panel):
    """A table, the most frequent first."""

    title = "Failures by cause"
    name = "failures"
    make = staticmethod(failures_view)

    def body(self) -> Sequence[Any]:
        self._table = html_block("heddle-failures-table")
        return (self._table,)
