"""One panel: a heading, and charts or a table that show one view. It sends to a tab only what has changed there.

Charts with one row per thing have labels at the rows, the first on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, FixedTicker, InlineStyleSheet
from bokeh.models.widgets import Div
from bokeh.plotting import figure

from heddle_dask.live.scheduler.dashboard.style import CSS, EDGE, FONT, QUIET, TEXT
from heddle_dask.live.scheduler.dashboard.view import View
from heddle_dask.views.history.run_snapshot import RunSnapshot

# Bokeh's toolbars cover the data: they appear under the pointer only.
_TOOLS = "xpan,xwheel_zoom,xbox_zoom,reset"

_NO_PLUGIN = "The scheduler has no heddle plugin yet: it comes with the first rollout."


class Panel:
    """Base of the panels."""

    title: ClassVar[str]  # shown above it
    name: ClassVar[str]
    make: ClassVar[staticmethod[[RunSnapshot], View]]  # computes its view of a snapshot

    def __init__(self) -> None:
        self._heading = html_block(f"heddle-{self.name}-heading")
        self._heading.text = f'<h2>{self.title}</h2><div class="empty">{_NO_PLUGIN}</div>'
        self._shown = View("", empty=_NO_PLUGIN)
        self.sources: dict[str, ColumnDataSource] = {}
        self._table: Div | None = None  # for subclasses: shows the table of the view
        self._body = column(*self.body(), sizing_mode="stretch_both", spacing=2, visible=False)
        # The Bokeh model of the whole panel.
        self.root = column(self._heading, self._body, sizing_mode="stretch_both", name=f"heddle-{self.name}", spacing=2)

    def body(self) -> Sequence[Any]:
        """For subclasses: the models below the heading."""
        raise NotImplementedError

    def show(self, view: View, snapshot: RunSnapshot) -> None:
        """Show this view; the heading tells to which line of the journal it belongs."""
        offset = f'<span class="heddle-offset" data-panel="{self.name}" data-offset="{snapshot.journal_offset}"></span>'
        why = f'<div class="empty">{view.empty}</div>' if view.empty else ""
        text = f"<h2>{self.title}</h2> {offset}{view.heading}{why}"
        if text != self._heading.text:
            self._heading.text = text
        for name, columns in view.sources.items():
            if self._shown.sources.get(name) is not columns:
                self.sources[name].data = columns
        if view.empty != self._shown.empty:
            # Axes without data say nothing: they go until there is some.
            self._body.visible = not view.empty
        if self._table is not None and view.html != self._shown.html:
            self._table.text = view.html
        self.adjust(view, self._shown)
        self._shown = view

    def adjust(self, view: View, before: View) -> None:
        """For subclasses: what follows from the view besides the data, such as labels of rows."""

    # -- helpers of subclasses ---------------------------------------------------------------------

    def source(self, name: str, columns: Sequence[str]) -> ColumnDataSource:
        """A source with these columns, empty so far."""
        made = ColumnDataSource({each: [] for each in columns}, name=f"heddle-{self.name}-{name}")
        self.sources[name] = made
        return made

    def chart(self, x_label: str, y_label: str, **options: Any) -> Any:
        """A figure in the style of the page."""
        options = {"tools": _TOOLS, "sizing_mode": "stretch_both", "min_height": 60, **options}
        made = figure(toolbar_location="right", output_backend="canvas", **options)
        made.toolbar.autohide = True
        made.toolbar.logo = None
        made.outline_line_color = None
        for axis, label in ((made.xaxis, x_label), (made.yaxis, y_label)):
            axis.axis_label = label
            axis.axis_label_text_font = axis.major_label_text_font = FONT
            axis.axis_label_text_font_style = "normal"
            axis.axis_label_text_font_size = axis.major_label_text_font_size = "11px"
            axis.axis_label_text_color = QUIET
            axis.major_label_text_color = TEXT
            axis.axis_line_color = axis.major_tick_line_color = EDGE
            axis.minor_tick_line_color = None
            axis.axis_label_standoff = 4
        made.grid.grid_line_color = "#E3E7EB"
        return made


def html_block(name: str, **options: Any) -> Div:
    """An HTML element in the style of the page."""
    return Div(
        text="",
        name=name,
        sizing_mode="stretch_width",
        stylesheets=[InlineStyleSheet(css=CSS)],
        **options,
    )


def row_positions(number: int) -> Any:
    """The middles of the rows, top down, in a chart whose y range starts at its end."""
    return np.arange(number, dtype=float) + 0.5


class RowLabels:
    """Labels of the rows, which may change with every snapshot."""

    def __init__(self) -> None:
        self.ticker = FixedTicker(ticks=[])
        self.axes: list[Any] = []

    def show(self, labels: Sequence[str]) -> None:
        """Label the rows, top down."""
        positions = [float(each) for each in row_positions(len(labels))]
        for axis in self.axes:
            axis.major_label_overrides = dict(zip(positions, labels, strict=True))
        self.ticker.ticks = positions


def label_rows(chart: Any, ticks: RowLabels) -> None:
    chart.yaxis.ticker = ticks.ticker
    chart.yaxis.major_tick_line_color = None
    chart.yaxis.axis_line_color = None
    ticks.axes.extend(chart.yaxis)
