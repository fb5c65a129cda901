"""The KV transfers to run now (Heddle, section 5.3): longest trajectories first, pairwise disjoint engines."""

from __future__ import annotations

from collections.abc import Iterable

from heddle_dask.core.view import MoveRequest


def choose_transfers(
    waiting: Iterable[MoveRequest],
    running: Iterable[MoveRequest] = (),
    *,
    max_running: int | None = None,
) -> list[MoveRequest]:
    """The transfers of `waiting` to start now, in this order.

    Greedy from the longest; a transfer that shares an engine, as source or target, with a running or chosen one is
    skipped and waits. The result is maximal: no further transfer could be added, unless `max_running` is reached.
    """
    running = list(running)
    busy = {engine for transfer in running for engine in (transfer.source, transfer.target)}
    room = None if max_running is None else max_running - len(running)
    chosen: list[MoveRequest] = []
    for transfer in sorted(waiting, key=lambda t: (-t.length_tokens, t.order)):
        if room is not None and len(chosen) >= room:
            break
        if transfer.source in busy or transfer.target in busy:
            continue
        busy |= {transfer.source, transfer.target}
        chosen.append(transfer)
    return chosen
