"""Turns of model services on chunks of GPUs: which service is next where, and when a busy copy ends its turn.

Requests join a busy copy as long as it has places, so a service with many requests would keep its chunks for ever. When
the oldest request of another service is older than all that wait for a busy copy, and no chunk is free for it, that
service is *next* on the chunk. After `TURN_LOADS` times the seconds of its load, the busy copy takes no more requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from heddle_dask.core.entities import Action, Host
from heddle_dask.core.gpu_chunks import GpuChunk
from heddle_dask.core.ids import HostId
from heddle_dask.core.pools import ModelService
from heddle_dask.core.resources import GPUS
from heddle_dask.core.service_copies import ServiceCopy
from heddle_dask.core.state import State
from heddle_dask.core.transitions import CopyState

TURN_LOADS = 4.0
"""A turn lasts at least this many times the load of the next service: loads take at most a fifth of the time."""


@dataclass(frozen=True, slots=True)
class NextTurn:
    """Where a service that waits is the next one."""

    host_id: HostId
    chunk: GpuChunk


class ServiceTurns:
    """Names for each service that waits in vain the chunk on which it is next; at most one for a service.

    Attributes
    ----------
    following
        The next turn of each service that has one.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.following: dict[str, NextTurn] = {}

    def is_over(self, copy: ServiceCopy) -> bool:
        """Whether the turn of a busy copy is over: it ends with the requests that it has."""
        lasted_s = self.state.at - copy.turn_began_at
        return any(
            turn.host_id == copy.host_id
            and service != copy.service
            and turn.chunk.overlaps(copy.chunk)
            and lasted_s >= self._least_s(service, turn)
            for service, turn in self.following.items()
        )

    def _least_s(self, service: str, turn: NextTurn) -> float:
        """How long a turn lasts at least before this service follows; it may follow at once where it is resident."""
        host = self.state.hosts[turn.host_id]
        there = host.gpus.copies.get((service, turn.chunk))
        if there is not None and there.state is CopyState.RESIDENT:
            return 0.0
        return TURN_LOADS * (self.load_s(self.state.services[service], host, turn.chunk.gpus) or 0.0)

    def load_s(self, service: ModelService, host: Host, gpus: int) -> float | None:
        """Expected seconds of a load on this host; None when nothing is known."""
        cold = (service.name, gpus) not in host.gpus.kept
        return self.state.load_seconds.expected(service, gpus, cold)

    def is_next(self, copy: ServiceCopy) -> bool:
        """Whether this copy is for the next turn of its service."""
        return self.following.get(copy.service) == NextTurn(copy.host_id, copy.chunk)

    def refresh(self) -> None:
        """Name the next turns anew: for services that begin to wait, and without hosts that are gone."""
        queues = self.state.service_queues
        for service, turn in list(self.following.items()):
            host = self.state.hosts.get(turn.host_id)
            if service not in queues or host is None or host.draining:
                del self.following[service]
        if len(self.following) == len(queues):
            return
        oldest = {service: self.state.actions[next(iter(queue))] for service, queue in queues.items()}
        numbers = {service: action.number for service, action in oldest.items()}
        for service, action in sorted(oldest.items(), key=lambda each: each[1].number):
            if service not in self.following:
                found = self._turn_for(action, numbers)
                if found is not None:
                    self.following[service] = found

    def _turn_for(self, action: Action, oldest: Mapping[str, int]) -> NextTurn | None:
        """The chunk whose turn began first, among those for which only younger requests wait."""
        hosts = [h for h in self.state.hosts.values() if not h.draining and h.spec.pool == action.spec.pool]
        best: tuple[tuple[bool, float], NextTurn] | None = None
        for host in hosts:
            gpus, free = host.gpus.buddies.gpus, host.gpus.buddies.counts()
            for size in action.spec.demand[GPUS].up_to(gpus):
                if free.take(size) is not None:
                    return None  # a chunk is free: its grant is up to the strategy
                for first in range(0, gpus - size + 1, size):
                    turn = NextTurn(host.spec.host_id, GpuChunk(first, size))
                    rank = self._rank(host, action, turn, oldest)
                    if rank is not None and (best is None or rank < best[0]):
                        best = rank, turn
        return None if best is None else best[1]

    def _rank(
        self, host: Host, action: Action, turn: NextTurn, oldest: Mapping[str, int]
    ) -> tuple[bool, float] | None:
        taken = self.following.values()
        if any(t.host_id == turn.host_id and t.chunk.overlaps(turn.chunk) for t in taken):
            return None
        busy = [copy for copy in host.gpus.on(turn.chunk) if copy.busy]
        for copy in busy:
            if copy.service in ("", action.spec.service):
                return None
            if oldest.get(copy.service, action.number) < action.number:
                return None
        cached = (action.spec.service, turn.chunk) in host.gpus.copies
        return not cached, max((copy.turn_began_at for copy in busy), default=self.state.at)
