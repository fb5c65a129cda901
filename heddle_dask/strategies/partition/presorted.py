"""The paper's presorted dynamic programming (Heddle, Eq. 3), and the same recurrence by bisection over its cut.

Both are for equal workers and are kept as references; `makespan` finds the same value much sooner.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from heddle_dask.core.errors import BadInput
from heddle_dask.strategies.partition.runs import Partition, Run

_Rows = tuple[list[float], list[list[int]]]


def presorted_dp(lengths: Sequence[float], token_s: Sequence[float], workers: int) -> Partition:
    """Eq. 3 as printed: O(n² m), every worker holds at least one trajectory.

    With dp[i][j] the least makespan of the first i trajectories on j workers,
    ``dp[i][1] = L(1) T F(i)`` and ``dp[i][j] = min_k max(dp[k][j-1], L(k+1) T F(i-k))``.

    Parameters
    ----------
    lengths
        From the longest to the shortest.
    token_s
        T·F(s) at index s - 1; at least as many as lengths.

    Raises
    ------
    BadInput
        Fewer trajectories than workers, or a table that is too short.
    """
    _check(lengths, token_s, workers)
    before, cuts = _first_row(lengths, token_s)
    for j in range(2, workers + 1):
        row, cut = [math.inf] * (len(lengths) + 1), [0] * (len(lengths) + 1)
        for i in range(j, len(lengths) + 1):
            for k in range(j - 1, i):
                value = lengths[k] * token_s[i - k - 1]
                if before[k] > value:
                    value = before[k]
                if value < row[i]:
                    row[i], cut[i] = value, k
        before = row
        cuts.append(cut)
    return _trace(before[-1], cuts)


def presorted_dp_by_bisection(lengths: Sequence[float], token_s: Sequence[float], workers: int) -> Partition:
    """Eq. 3 in O(n m log n): dp[k][j-1] rises with k and L(k+1) T F(i-k) falls, so the best cut is where they cross.

    Same arguments, value and errors as `presorted_dp`.
    """
    _check(lengths, token_s, workers)
    before, cuts = _first_row(lengths, token_s)
    for j in range(2, workers + 1):
        row, cut = [math.inf] * (len(lengths) + 1), [0] * (len(lengths) + 1)
        crossing = j - 1
        for i in range(j, len(lengths) + 1):

            def crossed(k: int, i: int = i, before: list[float] = before) -> bool:
                return before[k] >= lengths[k] * token_s[i - k - 1]

            # The crossing moves to the right with i, so the search starts at the last one.
            crossing = bisect_left(range(i), True, lo=crossing, hi=i - 1, key=crossed)
            row[i], cut[i] = _better_cut(crossing, i, j, before, lengths, token_s)
        before = row
        cuts.append(cut)
    return _trace(before[-1], cuts)


def _better_cut(
    crossing: int, i: int, j: int, before: list[float], lengths: Sequence[float], token_s: Sequence[float]
) -> tuple[float, int]:
    """The better of the cuts on either side of the crossing."""
    value = max(before[crossing], lengths[crossing] * token_s[i - crossing - 1])
    left = crossing - 1
    if left >= j - 1:
        other = max(before[left], lengths[left] * token_s[i - left - 1])
        if other < value:
            return other, left
    return value, crossing


def _check(lengths: Sequence[float], token_s: Sequence[float], workers: int) -> None:
    if not 1 <= workers <= len(lengths):
        raise BadInput(f"{len(lengths)} trajectories on {workers} workers: Eq. 3 leaves no worker empty")
    if len(token_s) < len(lengths):
        raise BadInput(f"token_s has {len(token_s)} sizes; Eq. 3 needs all {len(lengths)}")


def _first_row(lengths: Sequence[float], token_s: Sequence[float]) -> _Rows:
    row = [0.0] + [lengths[0] * token_s[i] for i in range(len(lengths))]
    return row, [[0] * (len(lengths) + 1)]


def _trace(seconds: float, cuts: list[list[int]]) -> Partition:
    """Walk back from the last cut to the first."""
    runs: list[Run] = []
    stop = len(cuts[0]) - 1
    for worker in range(len(cuts) - 1, -1, -1):
        start = cuts[worker][stop]
        runs.append(Run(worker, start, stop))
        stop = start
    return Partition(seconds, tuple(reversed(runs)))
