"""Which KV transfers run now (Heddle, section 5.3): longest trajectories first, pairwise disjoint endpoints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from heddle_dask.core.ids import EngineId, TrajectoryId


class Transfer(Protocol):
    """Anything with two ends, a length and a running number."""

    @property
    def source(self) -> EngineId: ...
    @property
    def target(self) -> EngineId: ...
    @property
    def length_tokens(self) -> float: ...
    @property
    def order(self) -> int: ...


T = TypeVar("T", bound=Transfer)


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """The KV of one trajectory is to go from `source` to `target`.

    Attributes
    ----------
    length_tokens
        Predicted length of the trajectory, what the order goes by.
    order
        Running number of the request: earlier first among equals.
    """

    trajectory_id: TrajectoryId
    source: EngineId
    target: EngineId
    length_tokens: float
    order: int


def choose_transfers(
    waiting: Iterable[T],
    running: Iterable[T] = (),
    *,
    max_running: int | None = None,
) -> list[T]:
    """Those of `waiting` that may start now, in the order in which to start them.

    Greedy from the longest; one that shares an engine, as source or target, with a running or chosen transfer is
    skipped and waits. No transfer that is left out could be added, unless `max_running` together is reached.
    """
    running = list(running)
    busy = {engine for transfer in running for engine in (transfer.source, transfer.target)}
    room = None if max_running is None else max_running - len(running)
    chosen: list[T] = []
    for transfer in sorted(waiting, key=lambda t: (-t.length_tokens, t.order)):
        if room is not None and len(chosen) >= room:
            break
        if transfer.source in busy or transfer.target in busy:
            continue
        busy |= {transfer.source, transfer.target}
        chosen.append(transfer)
    return chosen
