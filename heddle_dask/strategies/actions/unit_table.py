"""Units of an elastic resource by dynamic programming, for every prefix of the candidates at once.

ARL-Tangram, appendix B (DPArrange). Row i of the table holds the least cost of the first i candidates for every exact
number of units. The candidates that an eviction leaves are a prefix, so one table answers for every eviction: O(n m k)
for n candidates, m units and k amounts each, in place of O(n^2 m^2) with one table per prefix.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Literal, Protocol

from heddle_dask.core.gpu_chunks import FreeChunks


@dataclass(frozen=True, slots=True)
class UnitOptions:
    """The amounts with which a candidate can run, ascending, and what each costs, in seconds.

    Attributes
    ----------
    amounts
        At least one.
    costs
        As many as amounts.
    """

    amounts: tuple[int, ...]
    costs: tuple[float, ...]


class PrefixTable(Protocol):
    """The best amounts of the first candidates, for every number of them."""

    def cost(self, count: int) -> float:
        """Least total cost of the first `count` candidates; infinite where they do not all fit."""

    def units(self, count: int) -> list[int]:
        """The amounts of the first `count` candidates at that cost."""


@dataclass(slots=True)
class _Row:
    """Costs by exact units from `lowest` on, and the amount that the last candidate then has."""

    lowest: int
    costs: list[float]
    amounts: list[int]
    steps: list[float] | None  # differences of successive costs, where they ascend: the costs are convex


class UnitTable:
    """The table of a flat pool of units: CPUs of one host, or calls of an API.

    Parameters
    ----------
    options
        Those of each candidate, in order.
    units
        Units that are free for all of them.
    """

    def __init__(self, options: Sequence[UnitOptions], units: int) -> None:
        self._rows = [_Row(0, [0.0], [0], [])]
        for each in options:
            self._rows.append(_next_row(self._rows[-1], each, units))

    def cost(self, count: int) -> float:
        """Least total cost of the first `count` candidates, over all numbers of units; infinite where none suffices."""
        return min(self._rows[count].costs, default=inf)

    def units(self, count: int) -> list[int]:
        """The amounts of the first `count` candidates at that cost; of equal costs the fewest units."""
        costs = self._rows[count].costs
        used = self._rows[count].lowest + costs.index(min(costs))
        amounts = []
        for row in reversed(self._rows[1 : count + 1]):
            amounts.append(row.amounts[used - row.lowest])
            used -= amounts[-1]
        return amounts[::-1]


def _next_row(row: _Row, options: UnitOptions, units: int) -> _Row:
    steps = _convex_steps(options)
    if row.steps is not None and steps is not None:
        return _merged(row, row.steps, options, steps, units)
    return _searched(row, options, units)


def _convex_steps(options: UnitOptions) -> list[float] | None:
    """Differences of the costs where the amounts are successive numbers and the differences ascend; else None."""
    amounts, costs = options.amounts, options.costs
    if amounts[-1] - amounts[0] != len(amounts) - 1:
        return None
    steps = [after - before for before, after in pairwise(costs)]
    ascends = all(before <= after for before, after in pairwise(steps))
    return steps if ascends else None


def _merged(row: _Row, old: list[float], options: UnitOptions, new: list[float], units: int) -> _Row:
    """The row after a candidate with convex costs, all before it having convex costs too: O(m).

    The best split of one more unit is then the smallest step of the two, so the steps are merged.
    """
    lowest = row.lowest + options.amounts[0]
    if lowest > units or not row.costs:
        return _Row(lowest, [], [], [])
    cost, amount = row.costs[0] + options.costs[0], options.amounts[0]
    costs, amounts, steps = [cost], [amount], []
    i = j = 0
    for _ in range(min(units - lowest, len(old) + len(new))):
        if j == len(new) or (i < len(old) and old[i] <= new[j]):
            step, i = old[i], i + 1
        else:
            step, j, amount = new[j], j + 1, amount + 1
        cost += step
        costs.append(cost)
        amounts.append(amount)
        steps.append(step)
    return _Row(lowest, costs, amounts, steps)


def _searched(row: _Row, options: UnitOptions, units: int) -> _Row:
    """The row after a candidate with any set of amounts: O(m k)."""
    lowest = row.lowest + options.amounts[0]
    size = min(units, row.lowest + len(row.costs) - 1 + options.amounts[-1]) - lowest + 1
    if size <= 0 or not row.costs:
        return _Row(lowest, [], [], None)
    costs, amounts = [inf] * size, [0] * size
    for amount, own in zip(options.amounts, options.costs, strict=True):
        shift = amount - options.amounts[0]
        for used, before in enumerate(row.costs[: max(0, size - shift)], start=shift):
            if before + own < costs[used]:
                costs[used], amounts[used] = before + own, amount
    return _Row(lowest, costs, amounts, None)


# Numbers of GPUs by dynamic programming over free buddy chunks, for every prefix of the candidates at once.
#
# ARL-Tangram, appendix B (the GPU operator), with buddy semantics in place of the printed ones: an action takes the
# smallest sufficient chunk, which is split where it is larger. Chunks are never composed, which could span two nodes.


_Counts = tuple[int, ...]


class ChunkTable:
    """The table of the GPUs of a pool; its states are the free chunks by size over all hosts.

    Parameters
    ----------
    options
        Those of each candidate, in order; amounts are GPUs.
    chunks
        The free chunks of all hosts together: a chunk never spans hosts, so counts are all that matters.
    """

    def __init__(self, options: Sequence[UnitOptions], chunks: FreeChunks) -> None:
        self._rows: list[dict[_Counts, tuple[float, _Counts, int]]] = [{chunks.counts: (0.0, (), 0)}]
        after: dict[tuple[_Counts, int], _Counts | None] = {}
        for each in options:
            row: dict[_Counts, tuple[float, _Counts, int]] = {}
            for counts, (cost, _, _) in self._rows[-1].items():
                for gpus, own in zip(each.amounts, each.costs, strict=True):
                    key = (counts, gpus)
                    if key not in after:
                        left = FreeChunks(counts).take(gpus)
                        after[key] = None if left is None else left.counts
                    then = after[key]
                    if then is not None and cost + own < row.get(then, (inf,))[0]:
                        row[then] = (cost + own, counts, gpus)
            self._rows.append(row)

    def cost(self, count: int) -> float:
        """Least total cost of the first `count` candidates; infinite where they do not all fit."""
        return min((cost for cost, _, _ in self._rows[count].values()), default=inf)

    def units(self, count: int) -> list[int]:
        """The numbers of GPUs of the first `count` candidates at that cost; of equal costs that with most GPUs left."""
        row = self._rows[count]
        counts = min(row, key=lambda c: (row[c][0], -FreeChunks(c).gpus, c))
        gpus = []
        for each in reversed(self._rows[1 : count + 1]):
            _, counts, taken = each[counts]
            gpus.append(taken)
        return gpus[::-1]


# Estimate of the completion times of actions that have to wait (ARL-Tangram, appendix A).
#
# The paper tries a few amounts for the first waiting action and the least amounts for all others. An action that could
# wait a moment for many units then never looks better than the same action started now with few, and small allocations
# of long actions follow. `ahead` ``"all"`` tries each amount of a ladder for all waiting actions together.


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
    releases: Sequence[Release], waiting: Sequence[Waiting], depth: int, ahead: Ahead = "first", evicted: int = 0
) -> float:
    """Sum of the completion times of `waiting`, which start in order, each when enough units are free.

    Infinite where one of the first `evicted` would start at once: that is no eviction.

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
    return min(_queued_cost(heap.copy(), total, waiting, rung, ahead, evicted) for rung in tried)


def _queued_cost(
    heap: list[Release], total: int, waiting: Sequence[Waiting], rung: int, ahead: Ahead, evicted: int
) -> float:
    now = cost = 0.0
    idle = 0
    for number, action in enumerate(waiting):
        units, seconds = action.ladder[min(rung, len(action.ladder) - 1)]
        if units > total:
            units, seconds = action.ladder[0]
            if units > total:
                continue
        while idle < units:
            now, freed = heapq.heappop(heap)
            idle += freed
        if now <= 0.0 and number < evicted:
            return inf
        idle -= units
        cost += now + seconds
        heapq.heappush(heap, (now + seconds, units))
        if ahead == "first":
            rung = 0
    return cost


def candidates_kept(
    table: PrefixTable,
    candidates: Sequence[Waiting],
    behind: Sequence[Waiting],
    running: Sequence[Release],
    units: int,
    *,
    seconds: Sequence[Sequence[tuple[int, float]]],
    most: Sequence[int],
    depth: int,
    ahead: Ahead,
    least_kept: int,
) -> int:
    """Number of candidates that start now.

    One after the other is evicted from the tail, and its units go to the rest, as long as that shortens the estimated
    sum of completion times. What is evicted only stays queued.

    Parameters
    ----------
    table
        The best amounts of each prefix of the candidates.
    behind
        What waits behind the candidates, in order.
    running
        When running actions will free their units.
    units
        Free units, those of the candidates included.
    seconds
        For each candidate, its amounts and the seconds with each.
    most
        The most units that each candidate could ever use.
    depth, ahead
        Of the look-ahead (`look_ahead.waiting_cost`); depth 0: no eviction.
    least_kept
        Candidates that are never evicted.
    """
    kept = len(candidates)
    if depth < 1 or kept <= least_kept:
        return kept
    if table.units(kept) == list(most):
        return kept  # nobody gains by an eviction

    def cost(count: int) -> float:
        chosen = table.units(count)
        spans = [dict(options)[amount] for options, amount in zip(seconds, chosen, strict=False)]
        idle = units - sum(chosen)
        releases = [*running, *zip(spans, chosen, strict=True), (0.0, idle)]
        return table.cost(count) + waiting_cost(
            releases, [*candidates[count:], *behind], depth, ahead, len(candidates) - count
        )

    best = cost(kept)
    while kept > least_kept:
        evicted = cost(kept - 1)
        if evicted >= best:
            break
        kept, best = kept - 1, evicted
    return kept
