"""Small charts as SVG text: lines over two axes, bars, and a heat map. No library, no script, no external resource."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from heddle_dask.views.drawing.colours import SERIES, colour

INK, GRID, FIRST = colour("ink"), colour("grid"), SERIES[0]
# Shades of a heat map: cells of one shade are one path, which keeps pages with many engines small.
_SHADES = 50

_WIDTH, _HEIGHT = 620, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 26, 10, 40
_NAMES, _TEXTS = 190, 140
"""Pixels of a bar's row for its name, and for the text after it."""


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]


class Frame:
    """Linear axes from 0."""

    def __init__(self, width: int, height: int, most_x: float, most_y: float) -> None:
        self.width, self.height, self.most_x, self.most_y = width, height, most_x, most_y

    def x(self, value: float) -> float:
        return LEFT + (self.width - LEFT - RIGHT) * (value / self.most_x if self.most_x else 0.0)

    def y(self, value: float) -> float:
        return self.height - BOTTOM - (self.height - BOTTOM - TOP) * value / self.most_y

    def axes(self, x_label: str, y_label: str) -> str:
        parts = []
        for tick in range(6):
            x, y = self.most_x * tick / 5, self.most_y * tick / 5
            at_x, at_y = self.x(x), self.y(y)
            parts.append(
                f'<line x1="{LEFT}" x2="{self.width - RIGHT}" y1="{at_y:.1f}" y2="{at_y:.1f}" stroke="{GRID}"/>'
                f'<text x="{LEFT - 6}" y="{at_y + 4:.1f}" text-anchor="end">{number_text(y)}</text>'
                f'<text x="{at_x:.1f}" y="{self.height - BOTTOM + 15}" text-anchor="middle">{number_text(x)}</text>'
            )
        return "".join(parts) + labels(self.width, self.height, x_label, y_label)

    def band(self, below: Sequence[float], above: Sequence[float]) -> str:
        """The area between two step functions, as a path."""
        cells = len(above)
        edges = [self.x(self.most_x * cell / cells) for cell in range(cells + 1)]
        up = [f"{edges[cell]:.1f} {self.y(above[cell]):.1f}H{edges[cell + 1]:.1f}" for cell in range(cells)]
        down = [f"{edges[cell + 1]:.1f} {self.y(below[cell]):.1f}H{edges[cell]:.1f}" for cell in reversed(range(cells))]
        return "M" + "L".join([*up, *down]) + "z"


def labels(width: int, height: int, x_label: str, y_label: str) -> str:
    middle = (height - BOTTOM) / 2
    return (
        f'<text x="{(LEFT + width) / 2}" y="{height - 8}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">{escape(y_label)}</text>'
    )


def line_chart(lines: Sequence[Line], *, x_label: str, y_label: str) -> str:
    """Lines over common axes from 0, with a legend."""
    most_x = round_up(max((x for line in lines for x, _ in line.points), default=1.0))
    most_y = round_up(max((y for line in lines for _, y in line.points), default=1.0))
    frame = Frame(_WIDTH, _HEIGHT, most_x, most_y)
    parts = [frame.axes(x_label, y_label)]
    for number, line in enumerate(lines):
        hue = SERIES[number % len(SERIES)]
        points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline fill="none" stroke="{hue}" stroke-width="1.6" points="{points}"/>')
        parts.append(_legend(number, line.name, hue))
    return svg(_WIDTH, _HEIGHT + 16 * len(lines), parts)


def bar_chart(bars: Sequence[tuple[str, float, str]], *, most: float) -> str:
    """Horizontal bars: name, value, and the text after the bar; a line marks `most`."""
    wide = _WIDTH - _NAMES - _TEXTS
    height = 12 + 26 * len(bars)
    mark = f'x1="{_NAMES + wide}" x2="{_NAMES + wide}" y1="0" y2="{height}"'
    parts = [f'<line {mark} stroke="{INK}" stroke-dasharray="4 3"/>']
    for number, (name, value, text) in enumerate(bars):
        top = 6 + 26 * number
        length = wide * value / most if most > 0 else 0.0
        hue = SERIES[number % len(SERIES)]
        parts.append(f'<text x="0" y="{top + 13}">{escape(shortened(name, 28))}</text>')
        parts.append(f'<rect x="{_NAMES}" y="{top}" width="{length:.1f}" height="18" fill="{hue}"/>')
        parts.append(f'<text x="{_NAMES + wide + 8}" y="{top + 13}">{escape(text)}</text>')
    return svg(_WIDTH, height, parts)


def heat_map(rows: Sequence[tuple[str, Sequence[float]]], *, most: float, x_most_s: float, unit: str) -> str:
    """One line of cells per row, white for 0 and dark for `most` of `unit`; time runs to the right.

    Darkness grows with the square root, so that one of a hundred, the end of a tail, is still visible.
    """
    height = max(3, min(16, 480 // max(1, len(rows))))
    wide = _WIDTH - LEFT - RIGHT
    every = math.ceil(10 / height)
    parts = []
    boxes: dict[int, list[str]] = {}
    for number, (name, cells) in enumerate(rows):
        top = number * height
        if number % every == 0:
            parts.append(
                f'<text x="{LEFT - 6}" y="{top + max(9, height - 4)}" text-anchor="end">'
                f"{escape(shortened(name, 10))}</text>"
            )
        _cells(cells, top, height, wide, most, boxes)
    parts += [
        # Crisp edges: half-covered pixels of neighbours would show as stripes.
        f'<path fill="{FIRST}" fill-opacity="{shade / _SHADES:.3g}" shape-rendering="crispEdges" '
        f'd="{"".join(boxes[shade])}"/>'
        for shade in sorted(boxes, reverse=True)
    ]
    bottom = len(rows) * height
    parts.append(f'<text x="{LEFT}" y="{bottom + 14}">0 s</text>')
    parts.append(f'<text x="{_WIDTH - RIGHT}" y="{bottom + 14}" text-anchor="end">{number_text(x_most_s)} s</text>')
    parts.append(_shades(bottom + 22, most, unit))
    return svg(_WIDTH, bottom + 38, parts)


def _cells(cells: Sequence[float], top: int, height: int, wide: int, most: float, boxes: dict[int, list[str]]) -> None:
    width = wide / max(1, len(cells))
    for cell, value in enumerate(cells):
        if value > 0 and most > 0:
            shade = max(1, round(_SHADES * _shade(value, most)))
            box = f"M{LEFT + cell * width:.2f} {top}h{width:.2f}v{height - 0.5}h{-width:.2f}z"
            boxes.setdefault(shade, []).append(box)


def _shade(value: float, most: float) -> float:
    return math.sqrt(min(1.0, value / most))


def _shades(top: int, most: float, unit: str) -> str:
    """Legend of the colour scale: 0, 1, a quarter of `most`, and `most`."""
    parts = []
    for number, value in enumerate((0.0, min(1.0, most), most / 4, most)):
        x = LEFT + 90 * number
        parts.append(
            f'<rect x="{x}" y="{top}" width="14" height="10" fill="{FIRST}" stroke="{GRID}" '
            f'fill-opacity="{_shade(value, most) if most > 0 else 0:.3f}"/>'
            f'<text x="{x + 20}" y="{top + 9}">{number_text(value)}</text>'
        )
    parts.append(f'<text x="{LEFT + 360}" y="{top + 9}">{escape(unit)}</text>')
    return "".join(parts)


def _legend(number: int, name: str, hue: str) -> str:
    top = _HEIGHT + 16 * number
    return (
        f'<rect x="{LEFT}" y="{top}" width="14" height="10" fill="{hue}"/>'
        f'<text x="{LEFT + 20}" y="{top + 9}">{escape(name)}</text>'
    )


def svg(width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def round_up(value: float) -> float:
    """The least number of the form 1, 2 or 5 times a power of ten at or above the value."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= value * (1 - 1e-9))


def number_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def shortened(text: str, most: int) -> str:
    """The beginning of a text that is longer than `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"
