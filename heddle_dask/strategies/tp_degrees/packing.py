"""The earliest end of a mix of engines: runs of sorted trajectories, packed under a limit.

Engines from the largest degree to the smallest take one run each, as long as its seconds by work (`runs`) are within
the limit. Two orders are packed, and the earlier end counts: trajectories by length (few engines have long ones), and
whole groups by their longest member (prompts prefilled once). If long trajectories cannot be told from short ones,
they are packed in the given order: every engine may get a long one.

A trajectory with a context that fits the KV memory of some TP degrees only is not packed onto the others; a state
without an engine for it scores infinity.

Limits are on one geometric grid, so that all states of a search share the computed ends of runs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from heddle_dask.strategies.partition.work import Work, WorkEngine, WorkLoad, WorkPlan, busy_s
from heddle_dask.strategies.tp_degrees.degrees import AvailableGpus, State
from heddle_dask.strategies.tp_degrees.runs import Reach, SortedWorks


class Packing:
    """Scores states of one budget for one batch; see the module.

    Parameters
    ----------
    engines
        Cost and slots of one engine of each allowed degree.
    grid
        Ratio of neighbouring limits.
    told_apart
        Whether long trajectories can be told from short ones, so that engines can get runs in sorted order.
    """

    def __init__(
        self,
        works: Sequence[Work],
        budget: AvailableGpus,
        engines: Mapping[int, WorkEngine],
        grid: float,
        *,
        told_apart: bool = True,
    ) -> None:
        self._works, self._budget, self._engines, self._grid = works, budget, engines, grid
        self._orders = _orders(works) if told_apart else [SortedWorks(works, range(len(works)))]
        # By degree: trajectories by descending path alone, and these paths, negated for bisection.
        self._by_path: dict[int, list[int]] = {}
        self._paths: dict[int, list[float]] = {}
        for degree in budget.tp_degrees:
            paths = self._paths_s(degree)
            self._by_path[degree] = sorted(range(len(works)), key=paths.__getitem__, reverse=True)
            self._paths[degree] = [-paths[i] for i in self._by_path[degree]]
        self._ranks = [{i: at for at, i in enumerate(order.order)} for order in self._orders]
        self._reach: dict[tuple[int, int, int], Reach] = {}
        self._steps: dict[State, int] = {}
        self._low_s = max(min(-paths[0] for paths in self._paths.values()), 1e-9)
        high_s = max(self._alone_s(degree) for degree in budget.tp_degrees)
        self.last_step = 1 + max(0, math.ceil(math.log(high_s / self._low_s) / math.log(grid)))

    def _paths_s(self, degree: int) -> list[float]:
        """Seconds of each trajectory alone; infinite if its context fits other degrees only."""
        cost = self._engines[degree].cost
        most = max(self._engines[d].cost.capacity_tokens for d, _ in self._budget.uniform())
        return [
            math.inf
            if cost.capacity_tokens < min(most, work.context_tokens + work.decode_tokens)
            else work.path_s(cost)
            for work in self._works
        ]

    def _alone_s(self, degree: int) -> float:
        """Upper bound of the seconds of all trajectories on one engine."""
        engine, sums = self._engines[degree], self._orders[0]
        prompts = sums.prefill[-1] + sums.shared[0][-1]
        ends_s = busy_s(engine.cost, engine.slots, sums.longest[0], sums.decode[-1], sums.area[-1], prompts)
        longest_s = max((-path for path in self._paths[degree] if path > -math.inf), default=0.0)
        return max(ends_s, longest_s, self._low_s)

    def limit_s(self, step: int) -> float:
        return self._low_s * self._grid**step

    def seconds(self, state: State) -> float:
        """The first limit of the grid within which the engines of `state` end; infinite if they never do."""
        step = self._step(state)
        return self.limit_s(step) if step <= self.last_step else math.inf

    def _step(self, state: State) -> int:
        found = self._steps.get(state)
        if found is None:
            found = self.last_step + 1
            for order in range(len(self._orders)):
                # Search only for an earlier end than with the previous order.
                if found and self._packs(order, state, found - 1):
                    found = self._first_step(order, state, found - 1)
            self._steps[state] = found
        return found

    def _first_step(self, order: int, state: State, high: int) -> int:
        low = 0
        while low < high:
            middle = (low + high) // 2
            if self._packs(order, state, middle):
                high = middle
            else:
                low = middle + 1
        return low

    def _packs(self, order: int, state: State, step: int) -> bool:
        at, total = 0, len(self._works)
        for degree, count in zip(self._budget.tp_degrees, state, strict=True):
            if count:
                end = self.reach(order, degree, step).end
                for _ in range(count):
                    at = end(at)
                    if at == total:
                        return True
        return False

    def reach(self, order: int, degree: int, step: int) -> Reach:
        """Ends of runs of one order on engines of one degree within a limit."""
        found = self._reach.get((order, degree, step))
        if found is None:
            limit_s, rank = self.limit_s(step), self._ranks[order]
            slow = self._by_path[degree][: bisect_left(self._paths[degree], -limit_s)]
            stops = sorted(rank[i] for i in slow)
            found = Reach(self._engines[degree], self._orders[order], limit_s, stops)
            self._reach[(order, degree, step)] = found
        return found

    def plan(self, state: State) -> WorkPlan:
        """The packing of `state` applied to the trajectories, with its true seconds by work.

        `seconds(state)` must be finite. Engines are numbered from the largest degree to the smallest. Shared prompts
        are counted exactly here, and the better of the orders within the limit is returned.
        """
        step = self._step(state)
        plans = [self._carried_out(o, state, step) for o in range(len(self._orders)) if self._packs(o, state, step)]
        return min(plans, key=lambda plan: plan.seconds)

    def _carried_out(self, order: int, state: State, step: int) -> WorkPlan:
        engine_of = [0] * len(self._works)
        at, latest_s = 0, 0.0
        for number, degree in enumerate(self._budget.degrees_of(state)):
            end = self.reach(order, degree, step).end(at)
            run = self._orders[order].order[at:end]
            site = self._engines[degree]
            for i in run:
                engine_of[i] = number
            load = WorkLoad.of(site.cost, site.slots, (self._works[i] for i in run))
            at, latest_s = end, max(latest_s, load.seconds)
        return WorkPlan(latest_s, tuple(engine_of))


def _orders(works: Sequence[Work]) -> list[SortedWorks]:
    by_length = sorted(range(len(works)), key=lambda i: (-works[i].decode_tokens, i))
    orders = [SortedWorks(works, by_length)]
    by_group = [i for members in _groups(works, by_length) for i in members]
    if by_group != by_length and any(work.shared_tokens for work in works):
        orders.append(SortedWorks(works, by_group))
    return orders


def _groups(works: Sequence[Work], by_length: Sequence[int]) -> list[list[int]]:
    """Members of each group; groups in the order of their first members."""
    groups: dict[str, list[int]] = {}
    for i in by_length:
        groups.setdefault(works[i].group, []).append(i)
    return list(groups.values())
