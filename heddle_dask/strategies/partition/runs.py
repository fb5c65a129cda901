"""Values of a partition: workers, runs of presorted trajectories, and the longest run within a limit.

Trajectories are numbered from the longest to the shortest. By the paper's lemma, if the slowdown depends only on the
size of the group, there is an optimal partition in which every worker has a contiguous run; workers may be
heterogeneous. A shorter run never takes longer, so under a limit the longest run from each start is optimal.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from operator import lt

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import EngineCost


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
class WorkerRun:
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
    runs: tuple[WorkerRun, ...]

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


def worker_of(cost: EngineCost, slots: int, *, context_tokens: float, most: int) -> Worker:
    """One engine as a worker of Eq. 2: seconds per token of each of s = 1 … `most` trajectories.

    Up to the number of slots, T·F(s) is the time of an iteration with s decoding sequences; above it, members take
    turns, and T·F(s) is multiplied by s/slots. (The paper profiles F and simulates queueing; this is a simple version
    of its notes, 4.3.)

    Parameters
    ----------
    context_tokens
        Mean context of one trajectory.
    """
    table: list[float] = []
    for size in range(1, most + 1):
        batch = min(size, slots)
        seconds = cost.decode_token_s(batch, round(batch * context_tokens)) * (size / batch)
        table.append(max(seconds, table[-1]) if table else seconds)
    return Worker(tuple(table))


# Bisection over the makespan with greedy packing: the value of Eq. 3 without its table.
#
# For a limit C each worker in turn takes the longest run that ends within C. A failed attempt returns the next limit at
# which any run would change, a successful one its makespan, so the search ends at the exact optimum.


Attempt = Callable[[float], tuple[Partition | None, float]]
"""For a limit: a partition within it, or None and the next limit to try."""


def least_limit(attempt: Attempt, low: float, guess: float) -> Partition | None:
    """The partition of least makespan that `attempt` finds; None if it finds none at any limit.

    Parameters
    ----------
    low
        Lower bound of the makespan.
    guess
        First limit to try; it need not be feasible.
    """
    best, following = attempt(guess)
    if best is None:
        low = following
        best, _ = attempt(math.inf)
        if best is None:
            return None
    while low < best.seconds:
        limit = (low + best.seconds) / 2
        if not low <= limit < best.seconds:  # no float between the bounds
            limit = low
        found, following = attempt(limit)
        if found is not None:
            best = found
        else:
            low = following
    return best


def partition_in_order(trajectories: Presorted, workers: Sequence[Worker]) -> Partition | None:
    """The optimum of Eq. 2 when worker j takes the j-th run (the paper's order: fastest first).

    For identical workers this is the value of Eq. 3. Workers may stay empty.

    Returns
    -------
    Partition | None
        None if the trajectories do not fit: groups would exceed the tables.
    """
    if len(trajectories) == 0:
        return Partition(0.0, ())
    longest = trajectories.lengths[0]
    low = longest * min(worker.token_s[0] for worker in workers if worker.token_s)
    return least_limit(
        lambda limit: pack_in_order(trajectories, workers, limit), low, even_split_s(trajectories, workers)
    )


def even_split_s(trajectories: Presorted, workers: Sequence[Worker]) -> float:
    """A limit to start from: equal numbers of trajectories on all workers, each as long as the longest."""
    each = math.ceil(len(trajectories) / len(workers))
    slowest = max(w.token_s[min(each, len(w.token_s)) - 1] for w in workers if w.token_s)
    return trajectories.lengths[0] * slowest


def pack_in_order(trajectories: Presorted, workers: Sequence[Worker], limit: float) -> tuple[Partition | None, float]:
    """Greedy packing: each worker in turn takes the longest run within `limit` seconds (an `Attempt`)."""
    start, following = 0, math.inf
    runs: list[WorkerRun] = []
    for number, worker in enumerate(workers):
        stop, later = trajectories.reach(start, worker, limit)
        following = min(following, later)
        if stop > start:
            runs.append(WorkerRun(number, start, stop))
            start = stop
        if start == len(trajectories):
            seconds = max(trajectories.seconds(r.start, r.stop, workers[r.worker]) for r in runs)
            return Partition(seconds, tuple(runs)), following
    return None, following
