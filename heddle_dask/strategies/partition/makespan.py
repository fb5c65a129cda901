"""Bisection over the makespan with greedy packing: the value of Eq. 3 without its table.

For a limit C each worker in turn takes the longest run that ends within C. A failed attempt returns the next limit at
which any run would change, a successful one its makespan, so the search ends at the exact optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from heddle_dask.strategies.partition.runs import Partition, Presorted, Run, Worker

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


def pack_in_order(
    trajectories: Presorted, workers: Sequence[Worker], limit: float
) -> tuple[Partition | None, float]:
    """Greedy packing: each worker in turn takes the longest run within `limit` seconds (an `Attempt`)."""
    start, following = 0, math.inf
    runs: list[Run] = []
    for number, worker in enumerate(workers):
        stop, later = trajectories.reach(start, worker, limit)
        following = min(following, later)
        if stop > start:
            runs.append(Run(number, start, stop))
            start = stop
        if start == len(trajectories):
            seconds = max(trajectories.seconds(r.start, r.stop, workers[r.worker]) for r in runs)
            return Partition(seconds, tuple(runs)), following
    return None, following
