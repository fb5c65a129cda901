"""Elastic units for actions, first come or tail first (ARL-Tangram, section 4, corrected and extended)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from heddle_dask.core.entities import Action
from heddle_dask.core.ids import ActionId, HostId
from heddle_dask.core.resources import MEMORY
from heddle_dask.core.transitions import ActionState
from heddle_dask.core.view import ClusterView, EndedAction, Grant
from heddle_dask.core.waiting_actions import covers
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.actions.durations import Durations
from heddle_dask.strategies.actions.free_resources import FreeResources, elastic_of, main_resource
from heddle_dask.strategies.actions.signature_queues import SignatureQueue, SignatureQueues, Turn, offer_in_turn
from heddle_dask.strategies.actions.unit_choice import ActionCandidate, UnitChoice
from heddle_dask.strategies.actions.unit_table import Ahead
from heddle_dask.strategies.engine_costs import EngineCosts
from heddle_dask.strategies.remaining import tools_left_s


@dataclass(slots=True)
class ElasticUnits:
    """Start actions with their least units, first come or tail first; each may use what others leave idle.

    An elastic number of CPUs is a promise of the least and a reach of the most: the action has its least alone, and may
    use other CPUs of its host for as long as those that have them leave them idle. So nothing
    waits beside idle CPUs, and what arrives takes its own at once. GPUs and calls of an API, which cannot be lent, go
    to the candidates with a known speed-up by dynamic programming over the sum of completion times; the tail is
    evicted where its units help the others more (ARL-Tangram, section 4.2).

    A pass takes candidates per signature in order. It happens for the events of one moment together where units are
    chosen, and only where something has arrived or become free.

    Parameters
    ----------
    order
        ``"fcfs"``: by arrival; ``"tail"``: the trajectory with most predicted work left first, as long as there are
        predictions.
    max_wait_s
        Seconds after which an action goes before all that have waited less. If it does not fit, the resources that it
        needs are kept for it on one host: nothing starves.
    depth
        Amounts that the look-ahead tries for what waits: the least, twice that, and so on; 2 as in the paper, 0: no
        eviction.
    ahead
        Whether it tries them for the first that waits, as in the paper, or for all.
    window
        Waiting actions behind the candidates that the look-ahead counts.
    gather_s
        Seconds between an event and the pass for it; 0: the events that are already on their way come first.
    profile
        Cost profile of the engines, by which predicted tokens are seconds.
    """

    order: Literal["tail", "fcfs"] = "fcfs"
    max_wait_s: float = 60.0
    depth: int = 2
    ahead: Ahead = "first"
    window: int = 32
    gather_s: float = 0.0
    profile: str = "tiny-cpu"
    _costs: EngineCosts = field(init=False, compare=False, repr=False)
    _durations: Durations = field(init=False, compare=False, repr=False)
    _queues: SignatureQueues = field(init=False, compare=False, repr=False)
    _units: UnitChoice = field(init=False, compare=False, repr=False)
    _kept: dict[ActionId, HostId] = field(init=False, compare=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.order not in ("tail", "fcfs"):
            raise ValueError(f"order is {self.order!r}: use tail or fcfs")
        if self.ahead not in ("first", "all"):
            raise ValueError(f"ahead is {self.ahead!r}: use first or all")
        for name in ("max_wait_s", "depth", "window", "gather_s"):
            if not isinstance(getattr(self, name), int | float) or getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}: use a number of at least 0")
        self._costs = EngineCosts(self.profile)
        self._durations = Durations()
        self._queues = SignatureQueues(self._rank)
        self._units = UnitChoice(self._durations, self._queues, int(self.depth), self.ahead, int(self.window))

    # -- what it is told ---------------------------------------------------------------------------------

    def use_costs(self, known: Mapping[int, EngineCost]) -> None:
        self._costs = EngineCosts(self.profile, known)

    def action_ended(self, ended: EndedAction) -> None:
        self._durations.observe(ended)

    def pass_delay_s(self, view: ClusterView) -> float | None:
        """Wait for the other events of this moment where units are to be shared; plain actions start at once."""
        return self.gather_s if any(queue.elastic for queue in self._queues.active(view)) else None

    def _rank(self, view: ClusterView, action: Action) -> float:
        """Seconds until the trajectory's end, this action included; 0 where they are unknown or do not count."""
        if self.order == "fcfs":
            return 0.0
        trajectory = view.trajectory(action.spec.trajectory_id)
        tokens = trajectory.remaining_tokens("q90")
        if tokens is None:
            return 0.0
        self._costs.see(view.ready_engines)
        elastic = elastic_of(action.spec.demand)
        least = 1 if elastic is None else max(1, action.spec.demand[elastic].least)
        own_s = self._durations.seconds(action.spec, least)
        return tokens * self._costs.pace_s + tools_left_s(trajectory) + own_s

    # -- a pass ------------------------------------------------------------------------------------------

    def allocate(self, view: ClusterView) -> Sequence[Grant]:
        """Grants for the queues in which something may start now."""
        self._drop_kept(view)
        self._queues.hosts_changed(view)
        queues = self._queues.active(view)
        if not queues:
            return ()
        free = FreeResources(view)
        candidates = self._candidates(view, queues, free)
        grants = self._units.grants(view, free, candidates) if candidates else ()
        for grant in grants:
            self._kept.pop(grant.action_id, None)
        self._queues.allocated(queues)
        return grants

    def _drop_kept(self, view: ClusterView) -> None:
        """Open the hosts that are kept for an action which does not wait any more, or which are gone."""
        for action_id, host_id in list(self._kept.items()):
            action, host = view.action(action_id), view.host(host_id)
            if action is None or action.state is not ActionState.WAITING or host is None or host.draining:
                del self._kept[action_id]
                if host is not None:
                    self._queues.unblock(host.spec.pool, host_id)

    def _candidates(
        self, view: ClusterView, queues: Sequence[SignatureQueue], free: FreeResources
    ) -> list[ActionCandidate]:
        """The actions that fit with the least of everything, in order; each queue up to its first that does not."""
        found: list[ActionCandidate] = []
        places: dict[str, HostId] = {}
        for action_id, host_id in self._kept.items():
            kept = view.action(action_id)
            assert kept is not None, action_id
            free.close(host_id, frozenset(kept.spec.demand.names), action_id)
            # First of all: what is behind it in its queue, or before it since its host was lost, waits for its room.
            if free.apis_fit(kept.least) and free.host_fits(host_id, kept.spec.pool, kept.least, action_id):
                free.take(host_id, kept.spec.pool, kept.least)
                found.append(ActionCandidate(kept, host_id, Turn(True, 0.0, -kept.number, 0, kept)))
        first = {candidate.action.spec.action_id for candidate in found}

        def take(turn: Turn) -> bool | None:
            action = turn.action
            if action.spec.action_id in first:
                return True
            host_id = self._place(view, free, turn, places)
            if host_id is None:
                if not free.has_able_host(action.spec.pool, action.least):
                    return None
                if turn.overdue:
                    self._keep_room(view, free, action)
                return False
            free.take(host_id, action.spec.pool, action.least)
            found.append(ActionCandidate(action, host_id, turn))
            return True

        offer_in_turn(view, queues, self.max_wait_s, take)
        return found

    def _place(self, view: ClusterView, free: FreeResources, turn: Turn, places: dict[str, HostId]) -> HostId | None:
        """The host for the least amounts of an action; None: it does not fit now."""
        action = turn.action
        spec, need = action.spec, action.least
        if not free.apis_fit(need):
            return None
        host_id = places.get(spec.sandbox) or view.host_fixed(action) or self._kept.get(spec.action_id)
        if host_id is not None:
            if host_id not in free.hosts.get(spec.pool, {}):
                return None
            return host_id if free.host_fits(host_id, spec.pool, need, spec.action_id) else None
        # A sandbox keeps its memory for its life: the host with most of it, not the one with most CPUs at the moment.
        by = MEMORY if spec.sandbox else main_resource(spec.demand.names)
        host_id = free.best_host(action, need, by)
        if host_id is not None and spec.sandbox:
            places[spec.sandbox] = host_id
        return host_id

    def _keep_room(self, view: ClusterView, free: FreeResources, action: Action) -> None:
        """Keep what becomes free on one host for an action that has waited too long: the host that lacks least."""
        spec, need = action.spec, action.least
        if spec.action_id in self._kept or not free.apis_fit(need):
            return
        fixed = view.host_fixed(action)
        hosts = free.hosts.get(spec.pool, {})
        able = [
            host_id
            for host_id, host in hosts.items()
            if host_id not in self._kept.values() and fixed in (None, host_id) and covers(host.spec.resources, need)
        ]
        if not able:
            return
        by = main_resource(spec.demand.names)
        host_id = max(able, key=lambda each: free.of(each, spec.pool).get(by, 0))
        self._kept[spec.action_id] = host_id
        free.close(host_id, frozenset(spec.demand.names), spec.action_id)
