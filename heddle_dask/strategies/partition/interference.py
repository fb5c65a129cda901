"""Tables of T·F(s) for Eq. 2, from the cost model of an engine."""

from __future__ import annotations

from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.partition.runs import Worker


def worker_of(cost: EngineCost, slots: int, *, context_tokens: float, most: int) -> Worker:
    """One engine as Eq. 2 sees it: seconds per token of each of s = 1 … `most` trajectories.

    Up to the slots, T·F(s) is the iteration with s decoding; beyond, members take turns and it stretches by s/slots
    (the paper profiles F and plays queueing in a simulator: this is the simple rebuild of its notes, 4.3).

    Parameters
    ----------
    context_tokens
        Mean context of one trajectory.
    protect_kv
        Hold the members' KV to the engine's memory. Without, a group may exceed it and is assumed to take turns.
    """
    table: list[float] = []
    for size in range(1, most + 1):
        batch = min(size, slots)
        seconds = cost.decode_token_s(batch, round(batch * context_tokens)) * (size / batch)
        table.append(max(seconds, table[-1]) if table else seconds)
    return Worker(tuple(table))
