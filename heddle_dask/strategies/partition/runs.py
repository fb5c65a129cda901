"""The words of a partition: workers, runs of presorted trajectories, and how far a run may go.

Trajectories are numbered from the longest to the shortest. By the paper's lemma there is an optimal partition in
which every worker holds a contiguous run of them when the slowdown depends on the size of the group only; workers
may be unlike. A run that shrinks never takes longer, so under a limit the longest run from each start is the best.
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
    """One engine as Eq. 2 sees it.

    Attributes
    ----------
    token_s
        ``token_s[s - 1]`` is T·F(s): seconds per token of each of s trajectories that run together. Rises or
        stays with s; a group larger than the table is not allowed.
    """

    token_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if any(later < earlier for earlier, later in pairwise(self.token_s)):
            raise BadInput("token_s falls with the size of the group: interference must rise or stay")


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
        Makespan by Eq. 2: the largest longest-member x token_s of any run.
    """

    seconds: float
    runs: tuple[Run, ...]

    def sizes(self, workers: int) -> list[int]:
        """How many trajectories each worker takes, by worker number."""
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
        """Where the longest run from `start` that keeps to `limit` seconds stops, and the next limit that moves it.

        The second number is infinite when no limit would let the run go further.
        """
        length = self.lengths[start]
        table = worker.token_s
        size = bisect_right(table, limit / length) if length > 0 else len(table)
        # The quotient is rounded: the product decides, so that a limit equal to a makespan admits it.
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
