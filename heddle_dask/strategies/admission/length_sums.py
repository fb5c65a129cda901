"""Sums over those that wait, by length: what a forecast needs of thousands, kept up to date one by one."""

from __future__ import annotations

import math
from typing import NamedTuple

from heddle_dask.strategies.admission.engine_backlog import NOTHING, Ask

# Lengths within a step of this factor are taken for alike.
_STEP = math.log(1.05)


class Alike(NamedTuple):
    """Trajectories of about the same length: how many, and what they ask together."""

    members: int
    asks: Ask


_NOBODY = Alike(0, NOTHING)


class LengthSums:
    """What trajectories ask, summed by the length of the path ahead of them."""

    def __init__(self) -> None:
        self._alike: dict[int, Alike] = {}

    def add(self, path: float, ask: Ask) -> None:
        """One more."""
        key = _key(path)
        known = self._alike.get(key, _NOBODY)
        asks = Ask(*(a + b for a, b in zip(known.asks, ask, strict=True)))
        self._alike[key] = Alike(known.members + 1, asks)

    def remove(self, path: float, ask: Ask) -> None:
        """One less; both as they were added."""
        key = _key(path)
        known = self._alike[key]
        if known.members == 1:
            del self._alike[key]
        else:
            # Sums go down to what rounding leaves, and no further.
            asks = Ask(*(max(0.0, a - b) for a, b in zip(known.asks, ask, strict=True)))
            self._alike[key] = Alike(known.members - 1, asks)

    def longest_first(self) -> list[Alike]:
        """By length; at most a few hundred."""
        return [self._alike[key] for key in sorted(self._alike, reverse=True)]


def _key(path: float) -> int:
    return int(math.log(max(path, 1.0)) / _STEP)
