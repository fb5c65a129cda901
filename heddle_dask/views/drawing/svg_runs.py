"""Charts of trajectories as SVG text: phases of their time, what all do over time, one by one, and points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from heddle_dask.views.accounts import PHASE_TITLE, Phase, TimeSegment
from heddle_dask.views.drawing.colours import SERIES, colour
from heddle_dask.views.drawing.svg import (
    BOTTOM,
    GRID,
    INK,
    LEFT,
    RIGHT,
    TOP,
    Frame,
    labels,
    number_text,
    round_up,
    shortened,
    svg,
)

WIDE = 1240
# Segments that are narrower than this are not drawn: they could not be seen.
_LEAST_PIXELS = 0.3


@dataclass(frozen=True, slots=True)
class TimeMark:
    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One trajectory on the timeline: segments in seconds on the axis."""

    name: str
    title: str
    segments: Sequence[tuple[float, float, Phase]]


def phase_bar(phases_ns: Mapping[Phase, int], *, of_ns: int, width: int = 420, height: int = 14) -> str:
    """One bar, cut into phases; `of_ns` is the length of the whole width."""
    boxes, x = [], 0.0
    for phase, title in PHASE_TITLE.items():
        length = width * phases_ns.get(phase, 0) / of_ns if of_ns else 0.0
        if length >= 0.05:
            boxes.append(
                f'<rect x="{x:.2f}" width="{length:.2f}" height="{height}" fill="{colour(phase)}">'
                f"<title>{title} {phases_ns[phase] / 1e9:,.3f} s</title></rect>"
            )
        x += length
    return svg(width, height, boxes)


def phase_legend(parts: Sequence[Phase]) -> str:
    """Squares and names, as HTML."""
    return (
        '<p class="legend">'
        + "".join(f'<span><i style="background:{colour(phase)}"></i>{PHASE_TITLE[phase]}</span>' for phase in parts)
        + "</p>"
    )


def area_chart(
    series: Sequence[tuple[str, str, Sequence[float]]],
    *,
    until_s: float,
    y_label: str,
    marks: Sequence[TimeMark] = (),
    height: int = 300,
) -> str:
    """Areas on one another: (name, colour, value per cell); time runs to the right."""
    cells = len(series[0][2]) if series else 1
    totals = [sum(values[cell] for _, _, values in series) for cell in range(cells)]
    most = round_up(max(totals, default=1.0) or 1.0)
    frame = Frame(WIDE, height, round_up(until_s) if until_s <= 0 else until_s, most)
    parts = [frame.axes("seconds", y_label)]
    below = [0.0] * cells
    for name, hue, values in series:
        above = [low + value for low, value in zip(below, values, strict=True)]
        if any(values):
            parts.append(f'<path fill="{hue}" d="{frame.band(below, above)}"><title>{escape(name)}</title></path>')
        below = above
    parts += [_mark_line(frame.x(mark.at_s), TOP, height - BOTTOM, mark.text) for mark in marks]
    return svg(WIDE, height, parts)


def timeline(rows: Sequence[TimelineRow], *, until_s: float, marks: Sequence[TimeMark] = ()) -> str:
    """One line per trajectory, in the colours of the phases."""
    tall = max(4, min(14, 900 // max(1, len(rows))))
    left, wide = 150, WIDE - 150 - RIGHT
    scale = wide / until_s if until_s > 0 else 0.0
    every = math.ceil(11 / tall)
    parts = []
    for number, row in enumerate(rows):
        top = number * tall
        if number % every == 0:
            parts.append(
                f'<text x="{left - 6}" y="{top + max(9, tall - 3)}" text-anchor="end">'
                f"{escape(shortened(row.name, 24))}</text>"
            )
        boxes = _boxes(row.segments, left, scale, top, tall - (1 if tall > 5 else 0.5))
        paths = "".join(f'<path fill="{colour(phase)}" d="{box}"/>' for phase, box in boxes.items())
        parts.append(f"<g><title>{escape(row.title)}</title>{paths}</g>")
    bottom = tall * len(rows)
    for tick in range(6):
        x = left + wide * tick / 5
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom + 4}" stroke="{GRID}" stroke-width="0.6"/>')
        anchor = "end" if tick == 5 else "middle"
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="{anchor}">{number_text(until_s * tick / 5)} s</text>'
        )
    for mark in marks:
        x = left + mark.at_s * scale
        parts.append(_mark_line(x, 0, bottom, mark.text))
    return svg(WIDE, bottom + 24, parts)


def _boxes(
    segments: Sequence[tuple[float, float, Phase]], left: float, scale: float, top: int, height: float
) -> dict[Phase, str]:
    boxes: dict[Phase, list[str]] = {}
    for start, stop, phase in segments:
        width = (stop - start) * scale
        if width >= _LEAST_PIXELS:
            boxes.setdefault(phase, []).append(f"M{left + start * scale:.1f} {top}h{width:.1f}v{height}h-{width:.1f}z")
    return {phase: "".join(each) for phase, each in boxes.items()}


def scatter(
    points: Sequence[tuple[float, float]], *, x_label: str, y_label: str, width: int = 620, height: int = 420
) -> str:
    """Points over two logarithmic axes of one scale, with the diagonal."""
    known = [(x, y) for x, y in points if x > 0 and y > 0]
    least = min((min(point) for point in known), default=1.0)
    most = max((max(point) for point in known), default=10.0)
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most) + 1e-9)
    high = max(high, low + 1)
    wide, tall = width - LEFT - RIGHT, height - BOTTOM - TOP

    def place(value: float, length: float) -> float:
        return length * (math.log10(value) - low) / (high - low)

    parts = []
    for power in range(low, high + 1):
        x, y = LEFT + place(10.0**power, wide), height - BOTTOM - place(10.0**power, tall)
        text = number_text(10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        parts.append(f'<text x="{x:.1f}" y="{height - BOTTOM + 15}" text-anchor="middle">{text}</text>')
    parts.append(
        f'<line x1="{LEFT}" y1="{height - BOTTOM}" x2="{width - RIGHT}" y2="{TOP}" stroke="{INK}" '
        'stroke-dasharray="4 3" stroke-width="0.8"/>'
    )
    dots = "".join(f"M{LEFT + place(x, wide):.1f} {height - BOTTOM - place(y, tall):.1f}h0" for x, y in known)
    parts.append(
        f'<path d="{dots}" fill="none" stroke="{SERIES[0]}" stroke-opacity="0.45" stroke-width="4" '
        'stroke-linecap="round"/>'
    )
    parts.append(labels(width, height, x_label, y_label))
    return svg(width, height, parts)


def _mark_line(x: float, top: float, bottom: float, text: str) -> str:
    return (
        f'<g><title>{escape(text)}</title><line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="{INK}" '
        f'stroke-width="1" stroke-dasharray="2 3"/><text x="{x + 3:.1f}" y="{top + 10}">'
        f"{escape(shortened(text, 30))}</text></g>"
    )


def on_axis(segments: Sequence[TimeSegment], shift_s: float) -> list[tuple[float, float, Phase]]:
    """Segments in seconds, moved to their place on the axis."""
    return [(start / 1e9 + shift_s, stop / 1e9 + shift_s, phase) for start, stop, phase in segments]
