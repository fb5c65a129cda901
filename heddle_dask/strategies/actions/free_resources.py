"""What is free during one allocation of actions, as its own proposals use it up."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from heddle_dask.core.entities import Action, Host
from heddle_dask.core.gpu_chunks import FreeChunks
from heddle_dask.core.ids import ActionId, HostId
from heddle_dask.core.resources import CPUS, GPUS, MEMORY, ResourceDemand, Resources, api_of
from heddle_dask.core.view import ClusterView
from heddle_dask.core.waiting_actions import covers


@lru_cache(maxsize=1 << 16)
def granted(demand: ResourceDemand, units: int) -> Resources:
    """`ResourceDemand.with_units`, computed once."""
    return demand.with_units(units)


def elastic_of(demand: ResourceDemand) -> str | None:
    """The elastic resource of which units are chosen; memory has no speed-up, so its least amount is granted."""
    for name, amounts in zip(demand.names, demand.amounts, strict=True):  # a look at one or two is cheaper than a hash
        if amounts.most > amounts.least:
            return None if name == MEMORY else name
    return None


class FreeResources:
    """Free amounts of hosts, GPU chunks and APIs; starts as the view says, and is taken from."""

    def __init__(self, view: ClusterView) -> None:
        self._closed: dict[HostId, tuple[frozenset[str], ActionId]] = {}
        self.hosts: dict[str, dict[HostId, Host]] = {}
        for host in view.hosts:
            self.hosts.setdefault(host.spec.pool, {})[host.spec.host_id] = host
        self._view = view
        self._amounts: dict[HostId, dict[str, int]] = {}
        self._chunks: dict[HostId, FreeChunks] = {}
        self._apis: dict[str, int | None] = {}
        self._able: dict[tuple[str, Resources], bool] = {}

    def close(self, host_id: HostId, names: frozenset[str], action_id: ActionId) -> None:
        """Keep these resources of the host for one action: no other takes of them."""
        self._closed[host_id] = (names, action_id)

    def of(self, host_id: HostId, pool: str) -> dict[str, int]:
        amounts = self._amounts.get(host_id)
        if amounts is None:
            amounts = self._amounts[host_id] = dict(self.hosts[pool][host_id].free)
        return amounts

    def chunks(self, host_id: HostId, pool: str) -> FreeChunks:
        chunks = self._chunks.get(host_id)
        if chunks is None:
            chunks = self._chunks[host_id] = self._view.free_chunks(self.hosts[pool][host_id])
        return chunks

    def api(self, name: str) -> int | None:
        """Calls of the API that may start; None: no limit."""
        if name not in self._apis:
            self._apis[name] = self._view.api_free(name)
        return self._apis[name]

    def apis_fit(self, need: Resources) -> bool:
        """Whether the quotas allow this now."""
        for resource, amount in need:
            name = api_of(resource)
            if name is not None:
                free = self.api(name)
                if free is not None and free < amount:
                    return False
        return True

    def _seen(self, host_id: HostId, pool: str) -> dict[str, int]:
        """The free amounts of a host, only to look at."""
        return self._amounts.get(host_id) or self.hosts[pool][host_id].free

    def host_fits(self, host_id: HostId, pool: str, need: Resources, action_id: ActionId) -> bool:
        amounts = self._seen(host_id, pool)
        for name, amount in need.amounts:
            if amounts.get(name, 0) < amount and api_of(name) is None:
                return False
        if host_id in self._closed:
            closed, of = self._closed[host_id]
            if of != action_id and not closed.isdisjoint(name for name, _ in need):
                return False
        gpus = need[GPUS]
        return not gpus or self.chunks(host_id, pool).take(gpus) is not None

    def place(self, action: Action, need: Resources) -> HostId | None:
        """The host on which the action can have this now: the one that it is bound to, or the best; None: it waits."""
        spec = action.spec
        if not self.apis_fit(need):
            return None
        fixed = self._view.host_fixed(action)
        if fixed is None:
            return self.best_host(action, need, main_resource(spec.demand.names))
        there = fixed in self.hosts.get(spec.pool, {}) and self.host_fits(fixed, spec.pool, need, spec.action_id)
        return fixed if there else None

    def has_able_host(self, pool: str, need: Resources) -> bool:
        """Whether a host of the pool would have this if it were empty."""
        known = self._able.get((pool, need))
        if known is None:
            hosts = self.hosts.get(pool, {}).values()
            known = self._able[pool, need] = any(covers(host.spec.resources, need) for host in hosts)
        return known

    def take(self, host_id: HostId, pool: str, need: Resources) -> None:
        """Take this of a host and of the quotas; it must fit."""
        amounts = self.of(host_id, pool)
        for resource, amount in need:
            name = api_of(resource)
            if name is None:
                amounts[resource] -= amount
            else:
                free = self.api(name)
                self._apis[name] = None if free is None else free - amount
        gpus = need[GPUS]
        if gpus:
            left = self.chunks(host_id, pool).take(gpus)
            assert left is not None, f"{host_id} has no chunk of {gpus} GPUs"
            self._chunks[host_id] = left

    def best_host(self, action: Action, need: Resources, by: str) -> HostId | None:
        """The host that fits and has most of the resource `by` free; None: no host fits.

        With GPUs the one where the service is resident, then the one with the smallest sufficient chunk. Of equals the
        first to join.
        """
        spec = action.spec
        pool, hosts = spec.pool, self.hosts.get(spec.pool, {})
        if need[GPUS]:
            fitting = [host_id for host_id in hosts if self.host_fits(host_id, pool, need, spec.action_id)]
            return min(fitting, key=lambda each: self._chunk_cost(each, action, need[GPUS]), default=None)
        best, most = None, -1
        for host_id in hosts:
            amount = self._seen(host_id, pool).get(by, 0)
            if amount > most and self.host_fits(host_id, pool, need, spec.action_id):
                best, most = host_id, amount
        return best

    def _chunk_cost(self, host_id: HostId, action: Action, gpus: int) -> tuple[int, int, float]:
        spec = action.spec
        counts = self.chunks(host_id, spec.pool).counts
        split = next(level for level, count in enumerate(counts) if count and 1 << level >= gpus)
        rank = self._view.chunk_rank(self.hosts[spec.pool][host_id], spec.service, gpus)
        distance, _, used_at, _ = rank or (4, 0, 0.0, 0)
        return distance, split, used_at


def main_resource(names: Iterable[str]) -> str:
    """The resource by which hosts are compared: CPUs, unless only memory is demanded."""
    return MEMORY if set(names) == {MEMORY} else CPUS


def pooled(chunks: Iterable[FreeChunks]) -> FreeChunks:
    """The free chunks of several hosts together."""
    counts: list[int] = []
    for each in chunks:
        counts.extend([0] * (len(each.counts) - len(counts)))
        for level, count in enumerate(each.counts):
            counts[level] += count
    return FreeChunks(tuple(counts))


def has_service(view: ClusterView, host: Host, service: str, gpus: int) -> bool:
    """Whether the service is resident on a free chunk of this size."""
    return bool(service) and view.load_s(host, service, gpus) == 0.0
