"""Sums over those that wait, by length: what a forecast needs of thousands, kept up to date one by one."""

from __future__ import annotations

import math
from typing import NamedTuple

from heddle_dask.strategies.admission.engine_backlog import NOTHING, BacklogItem

# Lengths within a step of this factor are taken for alike.
_STEP = math.log(1.05)


class LengthClass(NamedTuple):
    """Trajectories of about the same length: how many, and what they item together."""

    members: int
    items: BacklogItem


_EMPTY = LengthClass(0, NOTHING)


class LengthSums:
    """What trajectories item, summed by the length of the path ahead of them."""

    def __init__(self) -> None:
        self._classes: dict[int, LengthClass] = {}

    def add(self, path: float, item: BacklogItem) -> None:
        """One more."""
        key = _key(path)
        known = self._classes.get(key, _EMPTY)
        items = BacklogItem(*(a + b for a, b in zip(known.items, item, strict=True)))
        self._classes[key] = LengthClass(known.members + 1, items)

    def remove(self, path: float, item: BacklogItem) -> None:
        """One less; both as they were added."""
        key = _key(path)
        known = self._classes[key]
        if known.members == 1:
            del self._classes[key]
        else:
            # Sums go down to what rounding leaves, and no further.
            items = BacklogItem(*(max(0.0, a - b) for a, b in zip(known.items, item, strict=True)))
            self._classes[key] = LengthClass(known.members - 1, items)

    def longest_first(self) -> list[LengthClass]:
        """By length; at most a few hundred."""
        return [self._classes[key] for key in sorted(self._classes, reverse=True)]


def _key(path: float) -> int:
    return int(math.log(max(path, 1.0)) / _STEP)
