"""Units of an elastic resource by dynamic programming, for every prefix of the candidates at once.

ARL-Tangram, appendix B (DPArrange). Row i of the table holds the least cost of the first i candidates for every exact
number of units. The candidates that an eviction leaves are a prefix, so one table answers for every eviction: O(n m k)
for n candidates, m units and k amounts each, in place of O(n^2 m^2) with one table per prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Protocol


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
