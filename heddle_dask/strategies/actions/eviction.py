"""How many candidates start now: the tail waits where that shortens the sum (ARL-Tangram, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence

from heddle_dask.strategies.actions.look_ahead import Ahead, Release, Waiting, waiting_cost
from heddle_dask.strategies.actions.unit_table import PrefixTable


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
        return table.cost(count) + waiting_cost(releases, [*candidates[count:], *behind], depth, ahead)

    best = cost(kept)
    while kept > least_kept:
        evicted = cost(kept - 1)
        if evicted >= best:
            break
        kept, best = kept - 1, evicted
    return kept
