"""Engines: slots, steps at the engine, steps that queue for it, and KV memory."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
from bokeh.layouts import row
from bokeh.models import HoverTool, NumeralTickFormatter, Range1d

from heddle_dask.live.scheduler.dashboard import style
from heddle_dask.live.scheduler.dashboard.panel import Panel, RowLabels, label_rows, row_positions
from heddle_dask.live.scheduler.dashboard.view import View
from heddle_dask.views.history.engine_history import LIVING
from heddle_dask.views.history.run_snapshot import EngineView, RunSnapshot

MOST_ROWS = 16
# Contexts of trajectories in tool calls may have been evicted: their sum may exceed the memory.
MOST_KV_SHARE = 1.2
_LEGEND = (
    style.chip(style.FREE, "slots")
    + style.chip(style.GENERATING, "steps at the engine")
    + style.chip(style.QUEUED, "queued steps")
    + style.chip(style.MOVE, "KV memory of its contexts")
)


def engines_view(snapshot: RunSnapshot) -> View:
    """The engines that are not lost; beyond `MOST_ROWS`, those with the most work."""
    here = [engine for engine in snapshot.engines if engine.state in LIVING]
    if not here:
        why = "No engine is there now." if snapshot.engines or not snapshot.is_open else "No engine has joined yet."
        return View("", {"engines": _columns([], [])}, why)
    shown = here
    if len(here) > MOST_ROWS:
        shown = sorted(here, key=lambda each: (-_load(each), each.index))[: MOST_ROWS - 1]
    labels = style.elide(_name(each) for each in shown)
    slots, at_engine, queued = (sum(getattr(e, name) for e in here) for name in ("slots", "generating", "queued"))
    part = ""
    rows = [_row(engine) for engine in shown]
    if len(shown) < len(here):
        part = f"; the {len(shown)} with the most work of {style.count(len(here))}, and the mean of the others"
        names = {engine.index for engine in shown}
        others = [_row(engine) for engine in here if engine.index not in names]
        rows.append(_mean(others))
        labels.append(f"{style.count(len(others))} others")
    heading = (
        f'<span class="sub"><b>{style.count(at_engine)}</b> steps at engines with <b>{style.count(slots)}</b> slots, '
        f"<b>{style.count(queued)}</b> queued{part}</span><div class='chips'>{_LEGEND}</div>"
    )
    return View(heading, {"engines": _columns(rows, labels)}, rows=tuple(labels))


def _name(engine: EngineView) -> str:
    state = "idle" if engine.is_idle else engine.state
    return engine.engine_id if state == "ready" else f"{engine.engine_id} ({state})"


def _load(engine: EngineView) -> float:
    return (engine.generating + engine.queued) / max(1, engine.slots)


_NUMBERS = ("slots", "generating", "queued", "kv", "steps", "tokens")


def _row(engine: EngineView) -> dict[str, Any]:
    numbers = (engine.slots, engine.generating, engine.queued, engine.kv_share or 0.0, engine.steps)
    return {
        **dict(zip(_NUMBERS, (*numbers, engine.generated_tokens), strict=True)),
        "kv_text": _kv_text(engine),
        "state": f"{engine.state}, TP {engine.tp_degree}",
    }


def _mean(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    means = {name: fmean(row[name] for row in rows) for name in _NUMBERS}
    return {**means, "kv_text": f"{means['kv']:.0%}", "state": "mean"}


def _columns(rows: Sequence[dict[str, Any]], labels: Sequence[str]) -> dict[str, Any]:
    columns: dict[str, Any] = {name: np.array([row[name] for row in rows], dtype=float) for name in _NUMBERS}
    # The queue stands behind the slots, also while a slot is free for a moment.
    queue_from = np.maximum(columns["slots"], columns["generating"])
    return columns | {
        "row": row_positions(len(rows)),
        "engine": list(labels),
        "queue_from": queue_from,
        "queue_to": queue_from + columns["queued"],
        "kv": np.minimum(columns["kv"], MOST_KV_SHARE),
        "kv_text": [row["kv_text"] for row in rows],
        "state": [row["state"] for row in rows],
    }


def _kv_text(engine: EngineView) -> str:
    if engine.kv_share is None:
        return f"{style.short(engine.resident_tokens)} tokens, capacity unknown"
    held, room = style.short(engine.resident_tokens), style.short(engine.kv_capacity_tokens)
    return f"{engine.kv_share:.0%}: {held} of {room} tokens"


class EnginesPanel(Panel):
    """Two bars per engine: its steps against its slots, and its KV memory."""

    title = "Engines"
    name = "engines"
    make = staticmethod(engines_view)

    def body(self) -> Sequence[Any]:
        source = self.source("engines", list(_columns([], [])))
        self._ticks = RowLabels()
        rows = Range1d(start=8, end=0)
        steps = self.chart("steps", "", y_range=rows, tools="")
        steps.x_range.start = 0
        bars = {"y": "row", "source": source, "line_color": None}
        steps.hbar(left=0, right="slots", height=0.74, fill_color=style.FREE, **(bars | {"line_color": style.EDGE}))
        steps.hbar(left=0, right="generating", height=0.54, fill_color=style.GENERATING, **bars)
        steps.hbar(left="queue_from", right="queue_to", height=0.54, fill_color=style.QUEUED, **bars)
        kv = self.chart("KV memory", "", y_range=rows, tools="", x_range=Range1d(start=0, end=MOST_KV_SHARE))
        kv.hbar(left=0, right=1, height=0.74, fill_color=style.FREE, **(bars | {"line_color": style.EDGE}))
        kv.hbar(left=0, right="kv", height=0.54, fill_color=style.MOVE, **bars)
        kv.xaxis.formatter = NumeralTickFormatter(format="0%")
        kv.xaxis.ticker.desired_num_ticks = 3
        kv.yaxis.visible = False
        for chart in (steps, kv):
            chart.ygrid.visible = False
            chart.add_tools(HoverTool(tooltips=_TOOLTIP, renderers=[chart.renderers[0]]))
        label_rows(steps, self._ticks)
        steps.xaxis.formatter = NumeralTickFormatter(format="0,0")
        steps.xaxis.ticker.min_interval = 1
        kv.sizing_mode, kv.width = "stretch_height", 150
        self._rows = rows
        return (row(steps, kv, sizing_mode="stretch_both"),)

    def adjust(self, view: View, before: View) -> None:
        if view.rows != before.rows:
            self._ticks.show(view.rows)
            # Few engines have bars of a common height, and white below.
            self._rows.start = max(len(view.rows), 8)


_TOOLTIP = [
    ("engine", "@engine (@state)"),
    ("steps", "@generating{0,0.[0]} at the engine, @queued{0,0.[0]} queued, @slots{0,0} slots"),
    ("KV memory", "@kv_text"),
    ("so far", "@steps{0,0} steps, @tokens{0,0} tokens"),
]
