"""Charts with one row per thing: labels at the rows, the first on top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import FixedTicker


def row_positions(number: int) -> Any:
    """The middles of the rows, top down, in a chart whose y range starts at its end."""
    return np.arange(number, dtype=float) + 0.5


class RowLabels:
    """Labels of the rows, which may change with every snapshot."""

    def __init__(self) -> None:
        self.ticker = FixedTicker(ticks=[])
        self.axes: list[Any] = []

    def show(self, labels: Sequence[str]) -> None:
        positions = [float(each) for each in row_positions(len(labels))]
        for axis in self.axes:
            axis.major_label_overrides = dict(zip(positions, labels, strict=True))
        self.ticker.ticks = positions


def label_rows(chart: Any, ticks: RowLabels) -> None:
    """Have these ticks label the rows of a chart."""
    chart.yaxis.ticker = ticks.ticker
    chart.yaxis.major_tick_line_color = None
    chart.yaxis.axis_line_color = None
    ticks.axes.extend(chart.yaxis)
