"""First come, first served, for actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from heddle_dask.core.entities import Action, Host
from heddle_dask.core.gpu_chunks import FreeChunks
from heddle_dask.core.quotas import calls_of
from heddle_dask.core.resources import CPUS, GPUS, Resources, api_of
from heddle_dask.core.view import ClusterView, Grant


@dataclass(slots=True)
class _Room:
    """What a host has left during one allocation."""

    host: Host
    view: ClusterView
    # Looked up and copied only for what asks for them: most allocations start one action on one of many hosts.
    chunks: FreeChunks | None = None
    taken: dict[str, int] = field(default_factory=dict)

    def takes(self, action: Action) -> bool:
        return self.host.spec.pool == action.spec.pool and action.host_fixed in (None, self.host.spec.host_id)

    def fits(self, need: Resources) -> bool:
        free, taken = self.host.free, self.taken
        for name, amount in need.amounts:
            if free.get(name, 0) - taken.get(name, 0) < amount and api_of(name) is None:
                return False
        return not need[GPUS] or self._free_chunks().take(need[GPUS]) is not None

    def free(self, name: str) -> int:
        return self.host.free.get(name, 0) - self.taken.get(name, 0)

    def _free_chunks(self) -> FreeChunks:
        if self.chunks is None:
            self.chunks = self.view.free_chunks(self.host)
        return self.chunks

    def take(self, need: Resources) -> None:
        for name, amount in need:
            if api_of(name) is None:
                self.taken[name] = self.taken.get(name, 0) + amount
        if need[GPUS]:
            self.chunks = self._free_chunks().take(need[GPUS])
            assert self.chunks is not None, "it fits"


class _FreeCalls:
    """Calls that may start now, by API; an API that one action waits for is closed to those behind it."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._free: dict[str, int | None] = {}

    def allow(self, need: Resources) -> bool:
        for name, calls in calls_of(need):
            if name not in self._free:
                self._free[name] = self._view.api_free(name)
            free = self._free[name]
            if free is not None and free < calls:
                self._free[name] = 0
                return False
        return True

    def take(self, need: Resources) -> None:
        for name, calls in calls_of(need):
            free = self._free[name]
            self._free[name] = None if free is None else free - calls


@dataclass(frozen=True, slots=True)
class FirstComeMinimum:
    """Start actions in order of arrival, each with its minimum of CPUs, on the host with most free CPUs.

    Strictly in order within a pool: a wide action at the head of the queue is not overtaken, so it cannot starve. An
    action with GPUs goes to the host with the best free chunk: one on which its model service is resident, or else one
    with empty memory, or else the one whose copies were not used for longest. An action that waits for the quota of an
    API holds back those behind it that call the same API, and no others. One that must go to the host of its sandbox
    keeps only that host from the actions behind it.
    """

    def allocate(self, view: ClusterView) -> Sequence[Grant]:
        rooms = [_Room(host, view) for host in view.hosts]
        open_pools = dict.fromkeys(room.host.spec.pool for room in rooms)
        calls = _FreeCalls(view)
        grants: list[Grant] = []
        for action in view.waiting_actions:
            if not open_pools:
                break
            pool, need = action.spec.pool, action.least
            if pool not in open_pools or not calls.allow(need):
                continue
            fitting = [room for room in rooms if room.takes(action) and room.fits(need)]
            if not fitting and action.host_fixed is not None:
                rooms = [room for room in rooms if room.host.spec.host_id != action.host_fixed]
                continue
            if not fitting:
                del open_pools[pool]
                continue
            room = _best(view, action, need[GPUS], fitting)
            room.take(need)
            calls.take(need)
            grants.append(Grant(action.spec.action_id, room.host.spec.host_id, need))
        return grants


def _best(view: ClusterView, action: Action, gpus: int, fitting: Sequence[_Room]) -> _Room:
    if gpus:
        ranks = [view.chunk_rank(room.host, action.spec.service, gpus) for room in fitting]
        ranked = [(rank, number) for number, rank in enumerate(ranks) if rank is not None]
        if ranked:
            return fitting[min(ranked)[1]]
    return max(fitting, key=lambda room: room.free(CPUS))  # ties: the first to join
