"""Simulated rollouts side by side on one self-contained HTML page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape

from heddle_dask.sim.rollout import SimulatedRollout, means
from heddle_dask.views.drawing.page import figure, page, section, table
from heddle_dask.views.drawing.svg import Line, bar_chart, heat_map, line_chart
from heddle_dask.workloads.planned import PlannedTrajectory

_CELLS = 120
_ROWS = 64
_POINTS = 300


def html_report(
    rollouts: Sequence[SimulatedRollout],
    trajectories: Sequence[PlannedTrajectory],
    conditions: Mapping[str, object],
) -> str:
    """The page: one rollout of each strategy over the same trajectories, all with a timeline.

    Parameters
    ----------
    conditions
        Conditions of the simulation by name; printed unchanged.
    """
    said = " · ".join(f"{name} {value}" for name, value in conditions.items())
    sections = [
        ("Bound reached", _bounds(rollouts)),
        ("Active trajectories", line_chart(_active(rollouts), x_label="seconds", y_label="trajectories")),
        ("Completed trajectories", line_chart(_completed(rollouts), x_label="seconds", y_label="share")),
        (
            "Queue time by length",
            line_chart(
                _queued(rollouts, trajectories),
                x_label="tokens that a trajectory generates: mean of each tenth, shortest first",
                y_label="mean seconds queued",
            ),
        ),
    ]
    charts = "".join(section(title, figure(chart)) for title, chart in sections)
    timelines = "".join(
        section(rollout.strategy, figure(chart), level=3)
        for rollout, chart in zip(rollouts, _timelines(rollouts), strict=True)
    )
    return page(
        "heddle simulate",
        f'<h1>Simulated rollouts</h1><p class="soft">{escape(said)}</p>{_table(rollouts)}'
        f'<div class="side">{charts}</div><h2>Running requests by engine</h2><div class="side">{timelines}</div>',
    )


def _table(rollouts: Sequence[SimulatedRollout]) -> str:
    head = (
        "strategy",
        "makespan s",
        "tokens/s",
        "share of bound",
        "median end s",
        "queued mean s",
        "preempted",
        "KV preempted",
    )
    rows = [
        (
            escape(one.strategy),
            f"{one.makespan_s:,.1f}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.bound_share:.1%}",
            f"{one.median_finish_s:,.1f}",
            f"{one.queue_mean_s:,.2f}",
            f"{one.preemptions:,}",
            f"{one.kv_preemptions:,}",
        )
        for one in rollouts
    ]
    short = "".join(f"<p>{escape(one.shortfall)}</p>" for one in rollouts if one.shortfall)
    return table(head, rows) + short


def _bounds(rollouts: Sequence[SimulatedRollout]) -> str:
    bound = min((one.bound for one in rollouts), key=lambda bound: bound.seconds)
    bars = [(one.strategy, one.bound_share, f"{one.bound_share:.1%} ({one.makespan_s:,.1f} s)") for one in rollouts]
    terms = (
        f"No strategy can be faster than {bound.seconds:,.1f} s: {bound.binding} (longest path {bound.path_s:,.1f} s, "
        f"work {bound.work_s:,.1f} s, both {bound.combined_s:,.1f} s, tools {bound.tools_s:,.1f} s): the dashed line."
    )
    return f"{bar_chart(bars, most=1.0)}<p>{terms}</p>"


def _active(rollouts: Sequence[SimulatedRollout]) -> list[Line]:
    lines = []
    for one in rollouts:
        assert one.timeline is not None
        heights = means(one.timeline.active, one.makespan_s, _POINTS)
        width_s = one.makespan_s / _POINTS
        lines.append(Line(one.strategy, [((i + 0.5) * width_s, height) for i, height in enumerate(heights)]))
    return lines


def _completed(rollouts: Sequence[SimulatedRollout]) -> list[Line]:
    lines = []
    for one in rollouts:
        ends = sorted(one.completed_s)
        picked = sorted({round(i * (len(ends) - 1) / _POINTS) for i in range(_POINTS + 1)}) if ends else []
        steps = ((ends[i], (i + 1) / one.trajectories) for i in picked)
        lines.append(Line(one.strategy, [(0.0, 0.0), *steps]))
    return lines


def _queued(rollouts: Sequence[SimulatedRollout], trajectories: Sequence[PlannedTrajectory]) -> list[Line]:
    order = sorted(range(len(trajectories)), key=lambda i: trajectories[i].generated_tokens)
    tenths = [order[len(order) * k // 10 : len(order) * (k + 1) // 10] for k in range(10)]
    lines = []
    for one in rollouts:
        points = [
            (
                statistics.fmean(trajectories[i].generated_tokens for i in tenth),
                statistics.fmean(one.waited_s[i] for i in tenth),
            )
            for tenth in tenths
            if tenth
        ]
        lines.append(Line(one.strategy, points))
    return lines


def _timelines(rollouts: Sequence[SimulatedRollout]) -> list[str]:
    """Heat maps with a common colour scale and time axis; of many engines an evenly spaced subset."""
    until_s = max(one.makespan_s for one in rollouts)
    tables = []
    for one in rollouts:
        assert one.timeline is not None
        names = list(one.timeline.running)
        shown = names if len(names) <= _ROWS else [names[i * len(names) // _ROWS] for i in range(_ROWS)]
        tables.append([(name, means(one.timeline.running[name], until_s, _CELLS)) for name in shown])
    most = max((value for table in tables for _, cells in table for value in cells), default=1.0)
    return [heat_map(table, most=most, x_most_s=until_s, unit="running requests") for table in tables]
