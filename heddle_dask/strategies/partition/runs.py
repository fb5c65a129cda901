"""Values of a partition: workers, runs of presorted trajectories, and the longest run within a limit.

Trajectories are numbered from the longest to the shortest. By the paper's lemma, if the slowdown depends only on the
size of the group, there is an optimal partition in which every worker has a contiguous run; workers may be
heterogeneous. A shorter run never takes longer, so under a limit the longest run from each start is optimal.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from operator import lt

from heddle_dask.core.errors import BadInput


@dataclass(frozen=True, slots=True)
class Worker:
    """One engine in Eq. 2.

    Attributes
    ----------
    token_s
        ``token_s[s - 1]`` is T·F(s): seconds per token of each of s trajectories that run together. Non-decreasing in
        s; groups larger than the table are not allowed.
    """

    token_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if any(later < earlier for earlier, later in pairwise(self.token_s)):
            raise BadInput("token_s falls with the size of the group: give values that do not fall")


@dataclass(frozen=True, slots=True)
class Run:
    """Worker number `worker` takes trajectories `start` to `stop` - 1."""

    worker: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Partition:
    """Runs that cover all trajectories once; workers without a run stay empty.

    Attributes
    ----------
    seconds
        Makespan by Eq. 2: maximum over the runs of longest member x token_s.
    """

    seconds: float
    runs: tuple[Run, ...]

    def sizes(self, workers: int) -> list[int]:
        """Number of trajectories of each worker, by worker number."""
        sizes = [0] * workers
        for run in self.runs:
            sizes[run.worker] = run.stop - run.start
        return sizes


class Presorted:
    """Trajectories from the longest to the shortest.

    Raises
    ------
    BadInput
        Lengths are not sorted in descending order.
    """

    __slots__ = ("lengths",)

    def __init__(self, lengths: Sequence[float]) -> None:
        self.lengths = lengths if isinstance(lengths, list) else list(lengths)
        if any(map(lt, self.lengths, islice(self.lengths, 1, None))):
            raise BadInput("lengths must be sorted in descending order")

    def __len__(self) -> int:
        return len(self.lengths)

    def reach(self, start: int, worker: Worker, limit: float) -> tuple[int, float]:
        """End of the longest run from `start` within `limit` seconds, and the next limit at which it would be longer.

        The second number is infinite if no limit makes the run longer.
        """
        length = self.lengths[start]
        table = worker.token_s
        size = bisect_right(table, limit / length) if length > 0 else len(table)
        # The quotient is rounded, so the product is checked: a limit equal to a makespan must admit it.
        while size > 0 and length * table[size - 1] > limit:
            size -= 1
        while size < len(table) and length * table[size] <= limit:
            size += 1
        stop = min(start + size, len(self.lengths))
        if size == len(table) or stop == len(self.lengths):
            return stop, math.inf
        return stop, length * table[size]

    def seconds(self, start: int, stop: int, worker: Worker) -> float:
        """Eq. 2 for one group: its longest member times T·F(size)."""
        return self.lengths[start] * worker.token_s[stop - start - 1]
