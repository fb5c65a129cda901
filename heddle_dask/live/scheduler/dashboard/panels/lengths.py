"""Predicted against actual lengths of the trajectories that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import HoverTool, NumeralTickFormatter

from heddle_dask.live.scheduler.dashboard import style
from heddle_dask.live.scheduler.dashboard.panel import Panel
from heddle_dask.live.scheduler.dashboard.view import View
from heddle_dask.views.history.run_snapshot import LengthPair, RunSnapshot

MOST_POINTS = 400
BEFORE_COLOUR, AFTER_COLOUR = style.QUEUED, style.GENERATING
_LEGEND = (
    style.chip(BEFORE_COLOUR, "predicted before the first step", "ring")
    + style.chip(AFTER_COLOUR, "after the first step", "dot")
    + style.chip(style.TEXT, "exact", "line")
)


def lengths_view(snapshot: RunSnapshot) -> View:
    """At most `MOST_POINTS` of the trajectories in the sample, and how good their predictions were."""
    pairs = [each for each in snapshot.lengths if each.actual_tokens > 0]
    if not pairs:
        why = "No trajectory with a prediction has ended yet." if snapshot.session else "No session is open."
        return View("", {"before": _points([], []), "after": _points([], []), "exact": _exact([])}, why)
    shown = [pairs[i] for i in _spread(len(pairs), MOST_POINTS)]
    first = [each.first_tokens for each in pairs]
    after = [each for each in pairs if each.after_step_tokens is not None]
    told = [f"before the first step <b>{_within(first, pairs):.0%}</b>"]
    if after:
        told.append(f"after it <b>{_within([each.after_step_tokens or 0.0 for each in after], after):.0%}</b>")
    sample = "" if len(shown) == snapshot.lengths_seen else f", {style.count(len(shown))} shown"
    heading = (
        f'<span class="sub">{style.count(snapshot.lengths_seen)} ended with a prediction{sample}; within a factor of '
        f"2: {', '.join(told)}</span><div class='chips'>{_LEGEND}</div>"
    )
    later = [each for each in shown if each.after_step_tokens is not None]
    sources = {
        "before": _points([each.first_tokens for each in shown], shown),
        "after": _points([each.after_step_tokens or 0.0 for each in later], later),
        "exact": _exact([each.actual_tokens for each in shown] + [each.first_tokens for each in shown]),
    }
    return View(heading, sources)


def _spread(number: int, most: int) -> list[int]:
    """At most `most` of the indices, evenly."""
    if number <= most:
        return list(range(number))
    return [i * number // most for i in range(most)]


def _within(predicted: Sequence[float], pairs: Sequence[LengthPair]) -> float:
    """Share of the predictions that are off by a factor of 2 at most."""
    close = sum(
        0.5 <= max(tokens, 1.0) / pair.actual_tokens <= 2.0 for tokens, pair in zip(predicted, pairs, strict=True)
    )
    return close / len(pairs)


def _points(predicted: Sequence[float], pairs: Sequence[LengthPair]) -> dict[str, Any]:
    # A logarithmic axis has no 0.
    return {
        "predicted": np.array([max(1.0, tokens) for tokens in predicted], dtype=float),
        "actual": np.array([pair.actual_tokens for pair in pairs], dtype=float),
    }


def _exact(values: Sequence[float]) -> dict[str, Any]:
    """The diagonal; without values some other one, since a logarithmic axis cannot be empty."""
    ends = [max(1.0, min(values)), max(1.0, *values)] if values else [100.0, 10_000.0]
    return {"tokens": np.array(ends, dtype=float)}


class LengthsPanel(Panel):
    """A point per trajectory and prediction."""

    title = "Predicted and actual length"
    name = "lengths"
    make = staticmethod(lengths_view)

    def body(self) -> Sequence[Any]:
        before = self.source("before", ["predicted", "actual"])
        after = self.source("after", ["predicted", "actual"])
        exact = self.source("exact", ["tokens"])
        chart = self.chart(
            "predicted tokens",
            "generated tokens",
            x_axis_type="log",
            y_axis_type="log",
            tools="pan,wheel_zoom,box_zoom,reset",
        )
        exact.data = dict(_exact([]))
        chart.line("tokens", "tokens", line_color=style.TEXT, line_dash="dashed", line_width=2, source=exact)
        rings = chart.scatter(
            "predicted",
            "actual",
            size=8,
            fill_alpha=0.0,
            line_color=BEFORE_COLOUR,
            line_width=1.5,
            source=before,
        )
        dots = chart.scatter(
            "predicted",
            "actual",
            size=6,
            fill_color=AFTER_COLOUR,
            fill_alpha=0.7,
            line_color=None,
            source=after,
        )
        for axis in (*chart.xaxis, *chart.yaxis):
            axis.formatter = NumeralTickFormatter(format="0,0")
            axis.ticker.desired_num_ticks = 4
        tooltip = [("predicted", "@predicted{0,0} tokens"), ("generated", "@actual{0,0} tokens")]
        chart.add_tools(HoverTool(tooltips=tooltip, renderers=[rings, dots]))
        return (chart,)
