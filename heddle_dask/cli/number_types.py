"""Types of number options: finite, bounded, and named in words that the error messages use."""

from __future__ import annotations

import math
from typing import Any

import click

MOST = 10_000_000
"""The largest count: more trajectories, engines or repeats than one machine could hold."""
_MOST_TOKENS = 2**31 - 1
_MOST_SEED = 2**63 - 1


class WholeNumber(click.IntRange):
    """A whole number in a closed range."""

    name = "whole number"

    def __init__(self, least: int, most: int = MOST) -> None:
        super().__init__(min=least, max=most)


class FiniteNumber(click.FloatRange):
    """A number in a range; neither nan nor infinite."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; fails in one line."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


COUNT = WholeNumber(1)
TOKENS = WholeNumber(2, _MOST_TOKENS)
SEED = WholeNumber(0, _MOST_SEED)
# Seconds and factors: 1e9 seconds are 31 years.
POSITIVE = FiniteNumber(min=0, max=1e9, min_open=True)
NOT_NEGATIVE = FiniteNumber(min=0, max=1e9)
