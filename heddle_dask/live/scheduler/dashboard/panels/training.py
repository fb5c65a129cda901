"""Training: rewards by step, how old the trained samples are, where the time goes, and the versions of the engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import HoverTool, NumeralTickFormatter

from heddle_dask.live.scheduler.dashboard import style
from heddle_dask.live.scheduler.dashboard.panel import Panel, html_block
from heddle_dask.live.scheduler.dashboard.view import View
from heddle_dask.views.history.run_snapshot import RunSnapshot, TrainingPoint, TrainingView

REWARD, HELD_OUT = "reward", "held_out_reward"
CHART_HEIGHT_PX = 240
_LEGEND = style.chip(style.GENERATING, "reward of the batch", "dot") + style.chip(
    style.RUNNING_TOOL, "reward on held-out tasks", "ring"
)


def training_view(snapshot: RunSnapshot) -> View:
    """Rewards by training step, and the figures of the latest one."""
    training = snapshot.training
    if training is None:
        why = "Nothing is trained on this cluster." if snapshot.session else "No session is open."
        return View("", {REWARD: _points((), REWARD), HELD_OUT: _points((), HELD_OUT)}, why)
    sources = {name: _points(training.points, name) for name in (REWARD, HELD_OUT)}
    return View(_heading(training), sources, html=_latest(training.points[-1]) if training.points else "")


def _points(points: Sequence[TrainingPoint], name: str) -> dict[str, Any]:
    having = [point for point in points if name in point.figures]
    return {
        "step": np.array([point.step for point in having], dtype=float),
        "value": np.array([point.figures[name] for point in having], dtype=float),
    }


def _heading(training: TrainingView) -> str:
    engines = ", ".join(
        f"<b>{style.count(number)}</b> at {style.escape(version)}"
        for version, number in training.engines_by_version.items()
    )
    pauses = (
        f"; {style.plural(training.updates, 'weight update')}, engines paused for "
        f"{style.duration(training.paused_mean_s)} on average, {style.duration(training.paused_max_s)} at most"
        if training.updates
        else ""
    )
    return (
        f'<span class="sub"><b data-figure="optimizer-steps" data-value="{training.optimizer_steps}">'
        f"{style.count(training.optimizer_steps)}</b> optimiser steps; published "
        f"{style.escape(training.published) or 'nothing yet'}; engines: {engines or 'none'}{pauses}</span>"
        f"<div class='chips'>{_LEGEND}</div>"
    )


def _latest(point: TrainingPoint) -> str:
    figures = "".join(
        f'<span class="tile"><span class="u">{style.escape(name)}</span> <b>{value:,.4g}</b></span>'
        for name, value in sorted(point.figures.items())
    )
    return f'<div class="tiles"><span class="tile"><b>step {style.count(point.step)}</b></span>{figures}</div>'


class TrainingPanel(Panel):
    """Rewards over the training steps, and the figures of the latest one."""

    title = "Training"
    name = "training"
    make = staticmethod(training_view)

    def body(self) -> Sequence[Any]:
        columns = ["step", "value"]
        batch, held_out = self.source(REWARD, columns), self.source(HELD_OUT, columns)
        chart = self.chart("optimiser step", "mean reward", sizing_mode="stretch_width", height=CHART_HEIGHT_PX)
        chart.line("step", "value", line_color=style.GENERATING, line_width=2, source=batch)
        dots = chart.scatter("step", "value", size=5, color=style.GENERATING, source=batch)
        rings = chart.scatter(
            "step",
            "value",
            size=9,
            fill_alpha=0.0,
            line_color=style.RUNNING_TOOL,
            line_width=2,
            source=held_out,
        )
        chart.xaxis.formatter = NumeralTickFormatter(format="0,0")
        chart.xaxis.ticker.min_interval = 1
        chart.add_tools(
            HoverTool(tooltips=[("step", "@step{0,0}"), ("reward", "@value{0.000}")], renderers=[dots, rings])
        )
        self._table = html_block("heddle-training-figures")
        return (chart, self._table)
