"""Units of the candidates of one pass: GPUs and API calls beyond their least amounts go where they shorten most.

CPUs are not chosen: an action may use idle ones beside its own for as long as they are idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from heddle_dask.core.entities import Action, Host
from heddle_dask.core.gpu_chunks import FreeChunks
from heddle_dask.core.ids import ActionId, HostId
from heddle_dask.core.nouns import DurationProfile
from heddle_dask.core.resources import CPUS, GPUS, Amounts, api_of
from heddle_dask.core.transitions import ActionState
from heddle_dask.core.view import ClusterView, Grant
from heddle_dask.strategies.actions.durations import Durations, nice_of
from heddle_dask.strategies.actions.free_resources import (
    FreeResources,
    elastic_of,
    granted,
    has_service,
    pooled,
)
from heddle_dask.strategies.actions.signature_queues import SignatureQueues, Turn
from heddle_dask.strategies.actions.unit_table import (
    Ahead,
    ChunkTable,
    PrefixTable,
    Release,
    UnitOptions,
    UnitTable,
    Waiting,
    candidates_kept,
)

OVERRUN = 0.25
"""Seconds that an action which runs longer than expected still needs, as a share of those that it has run."""


class ActionCandidate(NamedTuple):
    """An action that fits with the least of everything, and the host for it."""

    action: Action
    host_id: HostId
    turn: Turn


class _Share(NamedTuple):
    """A candidate that shares units, with its speed-up."""

    candidate: ActionCandidate
    profile: DurationProfile
    amounts: tuple[int, ...]


@dataclass(slots=True)
class UnitChoice:
    """Shares the free GPUs of each pool and the calls of each API among the candidates.

    Attributes
    ----------
    depth, ahead, window
        As in `ElasticUnits`.
    """

    durations: Durations
    queues: SignatureQueues
    depth: int
    ahead: Ahead
    window: int
    _running: dict[HostId, list[tuple[float, Action]]] = field(default_factory=dict)

    def grants(self, view: ClusterView, free: FreeResources, candidates: Sequence[ActionCandidate]) -> list[Grant]:
        """Grants for the candidates that start now, in their order."""
        chosen: dict[int, tuple[HostId, int | None]] = {}
        shares: dict[tuple[str, str, str], dict[int, _Share]] = {}
        for number, candidate in enumerate(candidates):
            chosen[number] = (candidate.host_id, self._without_limit(free, candidate))
            share = self._share(free, candidate)
            if share is not None:
                shares.setdefault(_scope(candidate), {})[number] = share
        for (pool, host, resource), sharing in shares.items():
            if resource == GPUS:
                self._share_gpus(view, free, pool, sharing, candidates, chosen)
            else:
                self._share_units(view, free, (pool, host, resource), sharing, candidates, chosen)
        return [
            self._grant(view, candidates[number], host_id, units) for number, (host_id, units) in sorted(chosen.items())
        ]

    def _grant(self, view: ClusterView, candidate: ActionCandidate, host_id: HostId, units: int | None) -> Grant:
        spec = candidate.action.spec
        elastic = elastic_of(spec.demand)
        resources = candidate.action.least if units is None else granted(spec.demand, units)
        seconds = self.durations.seconds(spec, 1 if elastic is None else resources[elastic])
        self._running.setdefault(host_id, []).append((view.at + seconds, candidate.action))
        host = view.host(host_id)
        reach_cpus = nice = 0
        if elastic == CPUS and not self._chooses(CPUS) and host is not None:
            reach_cpus, nice = min(spec.demand[CPUS].most, host.spec.cpus), nice_of(spec.profile)
        return Grant(spec.action_id, host_id, resources, reach_cpus, nice)

    # -- the candidates of one scope ---------------------------------------------------------------------

    def _share(self, free: FreeResources, candidate: ActionCandidate) -> _Share | None:
        """The candidate as one that shares units; None where it has its least amounts in any case."""
        spec = candidate.action.spec
        elastic = elastic_of(spec.demand)
        profile = None if elastic is None else self.durations.profile(spec)
        if elastic is None or profile is None or not self._chooses(elastic):
            return None
        amounts, least = spec.demand[elastic], candidate.action.least[elastic]
        most = self._most(free, spec.pool, elastic)
        if most is None:
            return None
        # A range may be wider than any host: what nobody can have is not counted through.
        return _Share(candidate, profile, _up_to(amounts, least + most))

    def _chooses(self, elastic: str) -> bool:
        """Whether units of this resource are chosen."""
        return elastic != CPUS

    def _most(self, free: FreeResources, pool: str, elastic: str) -> int | None:
        """The most units that one action can have beside its least; None: there is no limit."""
        api = api_of(elastic)
        if api is not None:
            return free.api(api)
        return max((host.spec.resources[elastic] for host in free.hosts[pool].values()), default=0)

    def _without_limit(self, free: FreeResources, candidate: ActionCandidate) -> int | None:
        """The units of a resource of which there is enough for all; None where units are shared."""
        spec = candidate.action.spec
        elastic = elastic_of(spec.demand)
        profile = None if elastic is None else self.durations.profile(spec)
        if elastic is None or profile is None or self._most(free, spec.pool, elastic) is not None:
            return None
        return spec.demand[elastic].most

    def _share_units(
        self,
        view: ClusterView,
        free: FreeResources,
        scope: tuple[str, str, str],
        sharing: dict[int, _Share],
        candidates: Sequence[ActionCandidate],
        chosen: dict[int, tuple[HostId, int | None]],
    ) -> None:
        """Share the units of a host, or the calls of an API."""
        pool, host, resource = scope
        api = api_of(resource)
        if api is not None:
            spare, hosts = free.api(api) or 0, list(free.hosts[pool])
        else:
            spare, hosts = free.of(HostId(host), pool).get(resource, 0), [HostId(host)]
        units = spare + sum(each.amounts[0] for each in sharing.values())
        table = UnitTable([_options(each, units) for each in sharing.values()], units)
        numbers = list(sharing)
        kept = self._kept(view, free, scope, hosts, list(sharing.values()), table, units, candidates)
        for number, amount in zip(numbers, table.units(kept), strict=False):
            chosen[number] = (candidates[number].host_id, amount)
            if api is None:
                free.of(candidates[number].host_id, pool)[resource] -= amount - sharing[number].amounts[0]
        for number in numbers[kept:]:  # the others may have got what these would have taken
            del chosen[number]
            if api is None:
                free.of(candidates[number].host_id, pool)[resource] += sharing[number].amounts[0]

    def _share_gpus(
        self,
        view: ClusterView,
        free: FreeResources,
        pool: str,
        sharing: dict[int, _Share],
        candidates: Sequence[ActionCandidate],
        chosen: dict[int, tuple[HostId, int | None]],
    ) -> None:
        """Share the free chunks of all hosts of a pool; the hosts follow from the chunks."""
        chunks: dict[HostId, FreeChunks] = {
            host_id: view.free_chunks(host) for host_id, host in free.hosts[pool].items()
        }
        for number, each in enumerate(candidates):
            gpus = each.action.least[GPUS]
            if gpus and number not in sharing and each.action.spec.pool == pool:
                left = chunks[each.host_id].take(gpus)
                assert left is not None, each.host_id
                chunks[each.host_id] = left
        together = pooled(chunks.values())
        shares = list(sharing.values())
        table = ChunkTable([_options(each, together.largest) for each in shares], together)
        if table.cost(len(shares)) == float("inf"):
            return  # the chunks of fixed hosts do not add up in this order: the least amounts were found one by one
        scope = (pool, "", GPUS)
        kept = self._kept(view, free, scope, list(chunks), shares, table, together.gpus, candidates)
        placed = _hosts_of_chunks(view, free, chunks, shares[:kept], table.units(kept))
        if placed is None:
            return
        for number, place in zip(sharing, placed, strict=False):
            chosen[number] = place
        for number in list(sharing)[kept:]:
            del chosen[number]

    # -- eviction ----------------------------------------------------------------------------------------

    def _kept(
        self,
        view: ClusterView,
        free: FreeResources,
        scope: tuple[str, str, str],
        hosts: Sequence[HostId],
        shares: Sequence[_Share],
        table: PrefixTable,
        units: int,
        candidates: Sequence[ActionCandidate],
    ) -> int:
        """Number of the candidates that start now."""
        pool, _, resource = scope
        # Where nothing runs, no event would bring the evicted back: one starts in any case. So do overdue ones.
        at_hosts = frozenset(hosts)
        others = sum(each.host_id in at_hosts for each in candidates) > len(shares)
        busy = others or (api_of(resource) is None and any(there.running for there in _of(view, hosts)))
        overdue = [number for number, each in enumerate(shares, start=1) if each.candidate.turn.overdue]
        least_kept = max([0 if busy else 1, *overdue])
        if self.depth < 1 or least_kept >= len(shares):
            return len(shares)
        waiting = [self._waiting(each.candidate.turn, resource) for each in shares]
        seconds = [[(amount, each.profile.seconds(amount)) for amount in each.amounts] for each in shares]
        left = {each.action.spec.action_id for each in candidates}
        behind = self._behind(scope, hosts, left, len(free.hosts[pool]))
        running = [release for host_id in hosts for release in self._releases(view, host_id, resource)]
        return candidates_kept(
            table,
            waiting,
            behind,
            running,
            units,
            seconds=seconds,
            most=[each.amounts[-1] for each in shares],
            depth=self.depth,
            ahead=self.ahead,
            least_kept=least_kept,
        )

    def _waiting(self, turn: Turn, resource: str) -> Waiting:
        spec, seconds = turn.action.spec, self.durations.seconds
        known = self.durations.profile(spec) is not None
        rungs = _ladder(spec.demand[resource])[: self.depth if known else 1]
        return Waiting(tuple((amount, seconds(spec, amount)) for amount in rungs))

    def _behind(
        self, scope: tuple[str, str, str], hosts: Sequence[HostId], left: set[ActionId], of_pool: int
    ) -> list[Waiting]:
        """The next actions that will compete for these units, without the candidates.

        Those that any of the `of_pool` hosts can run are spread over all of them.
        """
        pool, host, resource = scope
        turns: list[Turn] = []
        queues = {queue.signature: queue for host_id in hosts for queue in self.queues.of_host(pool, host_id)}
        for queue in queues.values():
            if resource in queue.signature.names:
                queue.begin()
                found = queue.first(self.window, left)
                turns += found if queue.signature.host or not host else found[::of_pool]
        turns.sort(reverse=True)
        return [self._waiting(turn, resource) for turn in turns[: self.window]]

    def _releases(self, view: ClusterView, host_id: HostId, resource: str) -> Iterable[Release]:
        """When the running actions of a host are expected to free their units."""
        running = [
            (ends_at, action)
            for ends_at, action in self._running.get(host_id, ())
            if action.state is ActionState.RUNNING and action.host == host_id
        ]
        self._running[host_id] = running
        for ends_at, action in running:
            units = action.resources[resource]
            if units:
                yield max(ends_at - view.at, OVERRUN * (view.at - action.started_at)), units


@lru_cache(maxsize=4096)
def _up_to(amounts: Amounts, limit: int) -> tuple[int, ...]:
    return amounts.up_to(limit)


def _is_of_cluster(resource: str) -> bool:
    """Whether the units are not those of one host."""
    return resource == GPUS or api_of(resource) is not None


@lru_cache(maxsize=4096)
def _ladder(amounts: Amounts) -> tuple[int, ...]:
    """The least amount, and amounts that are each at least twice the one before."""
    rungs = [amounts.least]
    while (wanted := max(1, 2 * rungs[-1])) < amounts.most:
        rungs.append(next(each for each in amounts.only if each >= wanted) if amounts.only else wanted)
    return (*rungs, amounts.most) if rungs[-1] < amounts.most else tuple(rungs)


def _scope(candidate: ActionCandidate) -> tuple[str, str, str]:
    """Pool, host and resource of the units that a candidate shares; the host is empty for GPUs and APIs."""
    spec = candidate.action.spec
    elastic = elastic_of(spec.demand) or ""
    return (spec.pool, "" if _is_of_cluster(elastic) else candidate.host_id, elastic)


def _options(share: _Share, units: int) -> UnitOptions:
    seconds, least = share.profile.seconds, share.amounts[0]
    amounts = tuple(amount for amount in share.amounts if amount <= units or amount == least)
    return UnitOptions(amounts, tuple(seconds(amount) for amount in amounts))


def _of(view: ClusterView, hosts: Iterable[HostId]) -> Iterable[Host]:
    return (host for host in map(view.host, hosts) if host is not None)


def _hosts_of_chunks(
    view: ClusterView,
    free: FreeResources,
    chunks: dict[HostId, FreeChunks],
    shares: Sequence[_Share],
    gpus: Sequence[int],
) -> list[tuple[HostId, int | None]] | None:
    """A host with the smallest sufficient chunk for each, in order; None where other resources do not allow it."""
    placed: list[tuple[HostId, int | None]] = []
    for share, wanted in zip(shares, gpus, strict=True):
        own, spec = share.candidate.host_id, share.candidate.action.spec
        bound = spec.demand.names != (GPUS,) or view.host_fixed(share.candidate.action) is not None
        fitting: list[tuple[bool, int, bool, HostId]] = []
        for host_id in (own,) if bound else tuple(chunks):
            counts = chunks[host_id].counts
            levels = (level for level, count in enumerate(counts) if count and 1 << level >= wanted)
            level = next(levels, None)
            if level is not None:
                absent = not has_service(view, free.hosts[spec.pool][host_id], spec.service, wanted)
                fitting.append((absent, level, host_id != own, host_id))
        if not fitting:
            return None
        host_id = min(fitting, key=lambda each: each[:3])[3]
        left = chunks[host_id].take(wanted)
        assert left is not None, host_id
        chunks[host_id] = left
        placed.append((host_id, wanted))
    return placed
