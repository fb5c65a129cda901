"""Small charts as SVG text: lines over two axes, bars, and a heat map. No library, no script, no external resource."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""The colours of Okabe and Ito, which are distinct for colour-blind readers."""

_WIDTH, _HEIGHT = 620, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 26, 10, 40
_NAMES, _TEXTS = 190, 140
"""Pixels of a bar's row for its name, and for the text after it."""


@dataclass(frozen=True, slots=True)
class Line:
    """A named polyline."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(lines: Sequence[Line], *, x_label: str, y_label: str) -> str:
    """Lines over common axes from 0, with a legend."""
    most_x = _round_up(max((x for line in lines for x, _ in line.points), default=1.0))
    most_y = _round_up(max((y for line in lines for _, y in line.points), default=1.0))
    parts = [_axes(most_x, most_y, x_label, y_label)]
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{_x(x, most_x):.1f},{_y(y, most_y):.1f}" for x, y in line.points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{points}"/>')
        parts.append(_legend(number, line.name, colour))
    return _svg(_WIDTH, _HEIGHT + 16 * len(lines), parts)


def bar_chart(bars: Sequence[tuple[str, float, str]], *, most: float) -> str:
    """Horizontal bars: name, value, and the text after the bar; a line marks `most`."""
    wide = _WIDTH - _NAMES - _TEXTS
    height = 12 + 26 * len(bars)
    mark = f'x1="{_NAMES + wide}" x2="{_NAMES + wide}" y1="0" y2="{height}"'
    parts = [f'<line {mark} stroke="#666" stroke-dasharray="4 3"/>']
    for number, (name, value, text) in enumerate(bars):
        top = 6 + 26 * number
        length = wide * value / most if most > 0 else 0.0
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<text x="0" y="{top + 13}">{escape(_short(name, 28))}</text>')
        parts.append(f'<rect x="{_NAMES}" y="{top}" width="{length:.1f}" height="18" fill="{colour}"/>')
        parts.append(f'<text x="{_NAMES + wide + 8}" y="{top + 13}">{escape(text)}</text>')
    return _svg(_WIDTH, height, parts)


def heat_map(rows: Sequence[tuple[str, Sequence[float]]], *, most: float, x_most_s: float, unit: str) -> str:
    """One line of cells per row, white for 0 and dark for `most` of `unit`; time runs to the right.

    Darkness grows with the square root, so that one of a hundred, the end of a tail, is still visible.
    """
    height = max(3, min(16, 480 // max(1, len(rows))))
    wide = _WIDTH - _LEFT - _RIGHT
    every = math.ceil(10 / height)
    parts = []
    for number, (name, cells) in enumerate(rows):
        top = number * height
        if number % every == 0:
            parts.append(
                f'<text x="{_LEFT - 6}" y="{top + max(9, height - 4)}" text-anchor="end">'
                f"{escape(_short(name, 10))}</text>"
            )
        parts += _cells(cells, top, height, wide, most)
    bottom = len(rows) * height
    parts.append(f'<text x="{_LEFT}" y="{bottom + 14}">0 s</text>')
    parts.append(
        f'<text x="{_WIDTH - _RIGHT}" y="{bottom + 14}" text-anchor="end">{_number(x_most_s)} s</text>'
    )
    parts.append(_shades(bottom + 22, most, unit))
    return _svg(_WIDTH, bottom + 38, parts)


def _cells(cells: Sequence[float], top: int, height: int, wide: int, most: float) -> list[str]:
    width = wide / max(1, len(cells))
    return [
        # Crisp edges: half-covered pixels of neighbours would show as stripes.
        f'<rect x="{_LEFT + cell * width:.2f}" y="{top}" width="{width:.2f}" height="{height - 0.5}" '
        f'fill="#0072b2" fill-opacity="{_shade(value, most):.3f}" shape-rendering="crispEdges"/>'
        for cell, value in enumerate(cells)
        if value > 0 and most > 0
    ]


def _shade(value: float, most: float) -> float:
    return math.sqrt(min(1.0, value / most))


def _shades(top: int, most: float, unit: str) -> str:
    """Legend of the colour scale: 0, 1, a quarter of `most`, and `most`."""
    parts = []
    for number, value in enumerate((0.0, min(1.0, most), most / 4, most)):
        x = _LEFT + 90 * number
        parts.append(
            f'<rect x="{x}" y="{top}" width="14" height="10" fill="#0072b2" stroke="#bbb" '
            f'fill-opacity="{_shade(value, most) if most > 0 else 0:.3f}"/>'
            f'<text x="{x + 20}" y="{top + 9}">{_number(value)}</text>'
        )
    parts.append(f'<text x="{_LEFT + 360}" y="{top + 9}">{escape(unit)}</text>')
    return "".join(parts)


def _axes(most_x: float, most_y: float, x_label: str, y_label: str) -> str:
    parts = []
    for tick in range(6):
        x, y = most_x * tick / 5, most_y * tick / 5
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{_y(y, most_y):.1f}" y2="{_y(y, most_y):.1f}" '
            'stroke="#ddd"/>'
        )
        parts.append(
            f'<text x="{_LEFT - 6}" y="{_y(y, most_y) + 4:.1f}" text-anchor="end">{_number(y)}</text>'
        )
        parts.append(
            f'<text x="{_x(x, most_x):.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{_number(x)}</text>'
        )
    parts.append(
        f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
    )
    middle = (_HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">{escape(y_label)}</text>'
    )
    return "".join(parts)


def _legend(number: int, name: str, colour: str) -> str:
    top = _HEIGHT + 16 * number
    return (
        f'<rect x="{_LEFT}" y="{top}" width="14" height="10" fill="{colour}"/>'
        f'<text x="{_LEFT + 20}" y="{top + 9}">{escape(name)}</text>'
    )


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _x(value: float, most: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / most


def _y(value: float, most: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / most


def _round_up(value: float) -> float:
    """The least number of the form 1, 2 or 5 times a power of ten at or above the value."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= value * (1 - 1e-9))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
