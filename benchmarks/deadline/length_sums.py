"""Sums over waiting trajectories by length, updated incrementally, for forecasts over thousands of them."""

from __future__ import annotations

import math
from typing import NamedTuple

from benchmarks.deadline.engine_backlog import NOTHING, BacklogItem

# Ratio of the bounds of a length class.
_STEP = math.log(1.05)


class LengthClass(NamedTuple):
    """Trajectories of about the same length: their number, and the sum of their backlog items."""

    members: int
    items: BacklogItem


_EMPTY = LengthClass(0, NOTHING)


class LengthSums:
    """Backlog items of trajectories, summed by the length of their remaining path."""

    def __init__(self) -> None:
        self._classes: dict[int, LengthClass] = {}

    def add(self, path: float, item: BacklogItem) -> None:
        """Add a trajectory."""
        key = _key(path)
        known = self._classes.get(key, _EMPTY)
        items = BacklogItem(*(a + b for a, b in zip(known.items, item, strict=True)))
        self._classes[key] = LengthClass(known.members + 1, items)

    def remove(self, path: float, item: BacklogItem) -> None:
        """Remove a trajectory; both arguments must be those of its `add`."""
        key = _key(path)
        known = self._classes[key]
        if known.members == 1:
            del self._classes[key]
        else:
            # Rounding must not make a sum negative.
            items = BacklogItem(*(max(0.0, a - b) for a, b in zip(known.items, item, strict=True)))
            self._classes[key] = LengthClass(known.members - 1, items)

    def longest_first(self) -> list[LengthClass]:
        """The length classes, longest first; at most a few hundred."""
        return [self._classes[key] for key in sorted(self._classes, reverse=True)]


def _key(path: float) -> int:
    return int(math.log(max(path, 1.0)) / _STEP)
