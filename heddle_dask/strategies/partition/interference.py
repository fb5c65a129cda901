"""Tables of T·F(s) for Eq. 2, from the cost model of an engine."""

from __future__ import annotations

from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.partition.runs import Worker


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
