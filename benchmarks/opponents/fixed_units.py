"""A fixed number of units for every elastic action: a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from heddle_dask.core.resources import ResourceDemand, Resources, api_of
from heddle_dask.core.view import ClusterView, Grant
from heddle_dask.strategies.actions.free_resources import FreeResources, elastic_of, granted
from heddle_dask.strategies.actions.signature_queues import SignatureQueues, Turn, offer_in_turn


@dataclass(slots=True)
class FixedUnits:
    """Start actions in order of arrival per signature, elastic ones with `units` units.

    An action whose demand does not contain that number gets the largest possible amount below it, or its least one.

    Parameters
    ----------
    units
        Units of the elastic resource; at least 1. The number to be tuned.
    """

    units: int = 4
    _queues: SignatureQueues = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.units, int) or self.units < 1:
            raise ValueError(f"units is {self.units!r}: use a whole number of at least 1")
        self._queues = SignatureQueues()

    def allocate(self, view: ClusterView) -> Sequence[Grant]:
        """Grants for the queues in which something may start now."""
        return first_come_grants(view, self._queues, self.units)


def first_come_grants(view: ClusterView, queues: SignatureQueues, units: int) -> Sequence[Grant]:
    """Grants in order of arrival per signature, elastic actions with `units` units as in `FixedUnits`."""
    queues.hosts_changed(view)
    active = queues.active(view)
    if not active:
        return ()
    free = FreeResources(view)
    grants: list[Grant] = []

    def take(turn: Turn) -> bool | None:
        spec = turn.action.spec
        need = fixed_amounts(free, spec.pool, spec.demand, units)
        host_id = free.place(turn.action, need)
        if host_id is None:
            return False if free.has_able_host(spec.pool, need) else None
        free.take(host_id, spec.pool, need)
        grants.append(Grant(spec.action_id, host_id, need))
        return True

    offer_in_turn(view, active, inf, take)
    queues.allocated(active)
    return grants


def fixed_amounts(free: FreeResources, pool: str, demand: ResourceDemand, units: int) -> Resources:
    """The least of everything, with `units` of the elastic resource, or with the nearest possible amount below.

    No more than the largest host of the pool has, so that an action with too many units does not wait for ever.
    """
    elastic = elastic_of(demand)
    if elastic is None:
        return demand.least
    if api_of(elastic) is None:
        units = min(units, max((h.spec.resources[elastic] for h in free.hosts.get(pool, {}).values()), default=units))
    return granted(demand, demand[elastic].nearest(units))
