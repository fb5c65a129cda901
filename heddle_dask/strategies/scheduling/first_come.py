"""First come, first served, for steps and for actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.ids import HostId
from heddle_dask.core.nouns import StepRequest
from heddle_dask.core.priority import Priority
from heddle_dask.core.view import ClusterView, Grant


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed:
    """Run steps in the order in which they were placed."""

    def priority(self, view: ClusterView, trajectory: Trajectory, step: StepRequest, order: int) -> Priority:
        """Each placement has its own level; earlier ones are higher."""
        return Priority(-order)


@dataclass(frozen=True, slots=True)
class FirstComeMinimum:
    """Start actions in order of arrival, each with its minimum of CPUs, on the host with most free CPUs.

    Strictly in order within a pool: a wide action at the head of the queue is not overtaken, so it cannot starve.
    """

    def allocate(self, view: ClusterView) -> Sequence[Grant]:
        """Grants for a prefix of the waiting actions of each pool."""
        free: dict[HostId, int] = {host.spec.host_id: host.free_cpus for host in view.hosts}
        pools = {host.spec.host_id: host.spec.pool for host in view.hosts}
        open_pools = dict.fromkeys(pools.values())
        grants: list[Grant] = []
        for action in view.waiting_actions:
            if not open_pools:
                break
            if action.spec.pool not in open_pools:
                continue
            need = action.spec.min_cpus
            fitting = [h for h, cpus in free.items() if cpus >= need and pools[h] == action.spec.pool]
            if not fitting:
                del open_pools[action.spec.pool]
                continue
            host_id = max(fitting, key=lambda h: free[h])  # ties: the first to join
            free[host_id] -= need
            grants.append(Grant(action.spec.action_id, host_id, need))
        return grants
