"""Estimate of the completion times of actions that have to wait (ARL-Tangram, appendix A).

The paper tries a few amounts for the first waiting action and the least amounts for all others. An action that could
wait a moment for many units then never looks better than the same action started now with few, and small allocations
of long actions follow. `ahead` ``"all"`` tries each amount of a ladder for all waiting actions together.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Release = tuple[float, int]
"""Seconds from now, and the units that become free then."""
Ahead = Literal["first", "all"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """An action that starts later.

    Attributes
    ----------
    ladder
        Amounts and the seconds with each, from the least amount on, each about twice the one before; at least one.
    """

    ladder: tuple[tuple[int, float], ...]


def waiting_cost(
    releases: Sequence[Release], waiting: Sequence[Waiting], depth: int, ahead: Ahead = "first"
) -> float:
    """Sum of the completion times of `waiting`, which start in order, each when enough units are free.

    Parameters
    ----------
    releases
        Units that are idle (at 0) and those of running and of just started actions, in any order. Actions that need
        more than all of them are left out.
    depth
        Rungs of the ladder that are tried, from the least on; at least 1, 2 in the paper. The best counts.
    ahead
        Whether a rung is tried for the first action, the others having their least amounts, or for all of them.
    """
    if not waiting:
        return 0.0
    heap = sorted(releases)  # a sorted list is a heap
    total = sum(units for _, units in heap)
    tried = range(min(depth, max(len(each.ladder) for each in (waiting if ahead == "all" else waiting[:1]))))
    return min(_queued_cost(heap.copy(), total, waiting, rung, ahead) for rung in tried)


def _queued_cost(
    heap: list[Release], total: int, waiting: Sequence[Waiting], rung: int, ahead: Ahead
) -> float:
    now = cost = 0.0
    idle = 0
    for action in waiting:
        units, seconds = action.ladder[min(rung, len(action.ladder) - 1)]
        if units > total:
            units, seconds = action.ladder[0]
            if units > total:
                continue
        while idle < units:
            now, freed = heapq.heappop(heap)
            idle += freed
        idle -= units
        cost += now + seconds
        heapq.heappush(heap, (now + seconds, units))
        if ahead == "first":
            rung = 0
    return cost
