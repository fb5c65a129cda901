"""Unlike workers (own T and F each): which worker takes which run.

With fixed sizes the paper's swap argument still holds, so runs stay contiguous; but the order of the workers is free,
and fastest-first is not always best. Workers of equal table and capacity form a class. For a limit C, the furthest
that a multiset of workers reaches is the best of "all but one, then that one", because a run that starts later
reaches at least as far: a table over multisets finds the best of all orders without trying them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from heddle_dask.strategies.partition.makespan import even_split_s, least_limit, pack_in_order
from heddle_dask.strategies.partition.runs import Partition, Presorted, Run, Worker


def partition_unlike(
    trajectories: Presorted, workers: Sequence[Worker], *, max_multisets: int = 4096, beam: int = 16
) -> Partition | None:
    """The least makespan (Eq. 2) over all contiguous partitions and all orders of unlike workers.

    Exact for Eq. 2 while the number of multisets of workers, the product of (class size + 1), is at most
    `max_multisets`: 16 workers of four degrees have at most 625. Beyond that a beam of that width per number of workers
    used is searched: on random instances with 6 to 10 workers, no two alike, a beam of 16 found the exact optimum in
    all of 300 and a beam of 4 stayed within 2.6 % of it (`tests/test_partition.py` repeats a part). With KV
    capacities the result is the best contiguous partition; others may be better, since a capacity breaks the swap
    argument.

    Returns
    -------
    Partition | None
        None when nothing was found that fits the tables and capacities.
    """
    if len(trajectories) == 0:
        return Partition(0.0, ())
    search = _OrderSearch(trajectories, workers)
    attempt = (
        search.exactly if search.multisets <= max_multisets else (lambda limit: search.by_beam(limit, beam))
    )
    low = trajectories.lengths[0] * min(worker.token_s[0] for worker in workers if worker.token_s)
    return least_limit(attempt, low, even_split_s(trajectories, workers))


class _OrderSearch:
    """Multisets of workers as mixed-radix numbers: digit c counts the workers of class c that are used."""

    def __init__(self, trajectories: Presorted, workers: Sequence[Worker]) -> None:
        self._trajectories = trajectories
        self._workers = workers
        self._members: list[list[int]] = []
        self._classes: list[Worker] = []
        for number, worker in enumerate(workers):
            if worker not in self._classes:
                self._classes.append(worker)
                self._members.append([])
            self._members[self._classes.index(worker)].append(number)
        radices = [len(members) + 1 for members in self._members]
        *self._strides, self.multisets = accumulate(radices, lambda a, b: a * b, initial=1)
        self._digits = [
            (stride, radix, worker)
            for stride, radix, worker in zip(self._strides, radices, self._classes, strict=True)
        ]

    def exactly(self, limit: float) -> tuple[Partition | None, float]:
        """The furthest reach of every multiset; done at the first that covers all."""
        count = len(self._trajectories)
        reach = self._trajectories.reach
        furthest, last = [0] * self.multisets, [-1] * self.multisets
        following = math.inf
        for number in range(1, self.multisets):
            best = -1
            for c, (stride, radix, worker) in enumerate(self._digits):
                if number // stride % radix == 0:
                    continue
                stop, later = reach(furthest[number - stride], worker, limit)
                if later < following:
                    following = later
                if stop > best:
                    best, last[number] = stop, c
            furthest[number] = best
            if best == count:
                return self._trace(number, last, limit), following
        return None, following

    def by_beam(self, limit: float, width: int) -> tuple[Partition | None, float]:
        """As `exactly`, with only the most promising multisets of each size kept.

        Promise: where it reaches, plus what the workers left would take if all started there (they start later, so
        they take at least as much).
        """
        count = len(self._trajectories)
        reach = self._trajectories.reach
        level, last = {0: 0}, {0: -1}
        following = math.inf
        while level:
            grown: dict[int, int] = {}
            promise: dict[int, float] = {}
            for number, start in level.items():
                free = [
                    (c, stride, radix - 1 - number // stride % radix, worker)
                    for c, (stride, radix, worker) in enumerate(self._digits)
                    if number // stride % radix < radix - 1
                ]
                reached = [reach(start, worker, limit) for *_, worker in free]
                following = min(following, min(later for _, later in reached)) if free else following
                room = sum(
                    (stop - start) * left for (_, _, left, _), (stop, _) in zip(free, reached, strict=True)
                )
                for (c, stride, _, _), (stop, _) in zip(free, reached, strict=True):
                    after = number + stride
                    if stop > grown.get(after, -1):
                        grown[after], last[after], promise[after] = stop, c, start + room
                    if stop == count:
                        return self._trace(after, last, limit), following
            kept = sorted(grown, key=lambda n: (-promise[n], -grown[n], n))[:width]
            level = {number: grown[number] for number in kept}
        return None, following

    def _trace(self, number: int, last: Mapping[int, int] | Sequence[int], limit: float) -> Partition:
        """Follow the last workers back to the empty multiset, then pack in that order."""
        order: list[int] = []
        while number:
            order.append(last[number])
            number -= self._strides[last[number]]
        free = [iter(members) for members in self._members]
        numbers = [next(free[c]) for c in reversed(order)]
        packed, _ = pack_in_order(self._trajectories, [self._workers[n] for n in numbers], limit)
        assert packed is not None  # the same reaches, in the same order
        runs = tuple(Run(numbers[run.worker], run.start, run.stop) for run in packed.runs)
        return Partition(packed.seconds, runs)
