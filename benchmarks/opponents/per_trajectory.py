"""A sandbox of fixed size for every trajectory, from its first action to its end: a baseline."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.opponents.fixed_units import first_come_grants, fixed_amounts
from heddle_dask.core.entities import Action, Trajectory
from heddle_dask.core.ids import HostId, TrajectoryId
from heddle_dask.core.resources import CPUS, Resources
from heddle_dask.core.transitions import ActionState
from heddle_dask.core.view import ClusterView, Grant
from heddle_dask.core.waiting_actions import covers
from heddle_dask.strategies.actions.free_resources import FreeResources
from heddle_dask.strategies.actions.signature_queues import SignatureQueues


@dataclass(slots=True)
class _Sandbox:
    """The host and the reserved share of a trajectory, its actions with their CPUs, and those that wait there."""

    host_id: HostId
    reserved: float
    running: dict[Action, int] = field(default_factory=dict)
    waiting: deque[Action] = field(default_factory=deque)


@dataclass(slots=True)
class PerTrajectory:
    """Reserve CPUs on one host for each trajectory at its first action, and run all its actions within them.

    As a container per trajectory does: what a trajectory reserves is idle while it generates. With `request` below
    `cpus` hosts take more trajectories than they could run at once, as with requests and limits of Kubernetes; an
    action then gets what is free, up to `cpus`, and waits where nothing is. Cores are never shared, so contention shows
    as waiting.

    Parameters
    ----------
    cpus
        Most CPUs of the actions of one trajectory; at least 1. The number to be tuned.
    request
        CPUs by which trajectories are counted on a host; 0: `cpus`.
    pool
        The pool with sandboxes; actions of other pools start in order of arrival, with up to `cpus` units.
    """

    cpus: int = 4
    request: float = 0.0
    pool: str = "cpu"
    _sandboxes: dict[TrajectoryId, _Sandbox] = field(init=False, compare=False, repr=False, default_factory=dict)
    _by_host: dict[HostId, dict[TrajectoryId, _Sandbox]] = field(
        init=False, compare=False, repr=False, default_factory=dict
    )
    _reserved: dict[HostId, float] = field(init=False, compare=False, repr=False, default_factory=dict)
    _others: SignatureQueues = field(init=False, compare=False, repr=False)
    _homeless: deque[Action] = field(init=False, compare=False, repr=False, default_factory=deque)

    def __post_init__(self) -> None:
        if not isinstance(self.cpus, int) or self.cpus < 1:
            raise ValueError(f"cpus is {self.cpus!r}: use a whole number of at least 1")
        if not 0 <= self.request <= self.cpus:
            raise ValueError(f"request is {self.request!r}: use a number from 0 to cpus")
        self._others = SignatureQueues(takes=lambda pool: pool != self.pool)

    def forget(self, trajectory: Trajectory) -> None:
        """The trajectory has ended: its CPUs are for others."""
        sandbox = self._sandboxes.pop(trajectory.trajectory_id, None)
        if sandbox is not None:
            del self._by_host[sandbox.host_id][trajectory.trajectory_id]
            self._reserved[sandbox.host_id] -= sandbox.reserved

    def allocate(self, view: ClusterView) -> Sequence[Grant]:
        """Grants for actions of trajectories with a sandbox, and sandboxes for the oldest of the others."""
        free = FreeResources(view)
        grants: list[Grant] = []
        self._leave_hosts(free)
        touched: dict[TrajectoryId, _Sandbox] = {}
        for action in view.new_actions:
            if action.spec.pool == self.pool:
                sandbox = self._sandboxes.get(action.spec.trajectory_id)
                if sandbox is None:
                    self._homeless.append(action)
                else:
                    sandbox.waiting.append(action)
                    touched[action.spec.trajectory_id] = sandbox
        for host_id in view.freed_hosts:
            touched.update((i, s) for i, s in self._by_host.get(host_id, {}).items() if s.waiting)
        for name, sandbox in touched.items():
            self._start(free, name, sandbox, grants)
        self._house(view, free, grants)
        return [*grants, *first_come_grants(view, self._others, self.cpus)]

    def _house(self, view: ClusterView, free: FreeResources, grants: list[Grant]) -> None:
        """Sandboxes for the oldest homeless actions; the first without room holds back the others."""
        later: deque[Action] = deque()
        while self._homeless:
            action = self._homeless[0]
            if action.state is ActionState.WAITING:
                need = fixed_amounts(free, self.pool, action.spec.demand, 1)
                name = action.spec.trajectory_id
                home = self._sandboxes.get(name)
                if home is None and not free.has_able_host(self.pool, need):
                    later.append(action)
                else:
                    home = home or self._reserve(view, free, action, need)
                    if home is None:
                        break
                    home.waiting.append(action)
                    self._start(free, name, home, grants)
            self._homeless.popleft()
        self._homeless.extendleft(reversed(later))

    def _leave_hosts(self, free: FreeResources) -> None:
        """Sandboxes on hosts that are gone or drain start anew elsewhere."""
        there = free.hosts.get(self.pool, {})
        for host_id in [each for each in self._by_host if each not in there]:
            self._reserved.pop(host_id, None)
            for name, sandbox in self._by_host.pop(host_id).items():
                del self._sandboxes[name]
                self._homeless.extend(sandbox.waiting)

    def _reserve(self, view: ClusterView, free: FreeResources, action: Action, need: Resources) -> _Sandbox | None:
        """A sandbox on the host with most unreserved CPUs; None: no host has enough."""
        spec, fixed = action.spec, view.host_fixed(action)
        hosts = {
            host_id: host.spec.cpus
            for host_id, host in free.hosts.get(self.pool, {}).items()
            if fixed in (None, host_id) and covers(host.spec.resources, need)
        }
        if not hosts:
            return None
        # A trajectory larger than the largest host gets that whole.
        share = min(self.request or self.cpus, max(hosts.values()))
        unreserved = {h: cpus - self._reserved.get(h, 0.0) for h, cpus in hosts.items()}
        host_id = max(unreserved, key=lambda each: unreserved[each])
        if unreserved[host_id] < share:
            return None
        sandbox, name = _Sandbox(host_id, share), spec.trajectory_id
        self._sandboxes[name] = self._by_host.setdefault(host_id, {})[name] = sandbox
        self._reserved[host_id] = self._reserved.get(host_id, 0.0) + share
        return sandbox

    def _start(self, free: FreeResources, name: TrajectoryId, sandbox: _Sandbox, grants: list[Grant]) -> None:
        host_id = sandbox.host_id
        sandbox.running = {a: n for a, n in sandbox.running.items() if a.state is not ActionState.ENDED}
        while sandbox.waiting:
            action = sandbox.waiting[0]
            spec = action.spec
            if action.state is ActionState.WAITING:
                room = max(self.cpus, spec.demand[CPUS].least) - sum(sandbox.running.values())
                room = min(room, free.of(host_id, self.pool).get(CPUS, 0))
                need = fixed_amounts(free, self.pool, spec.demand, max(1, room))
                if not covers(free.hosts[self.pool][host_id].spec.resources, need):
                    self._move_out(name, sandbox)
                    return
                fits = free.host_fits(host_id, self.pool, need, spec.action_id) and free.apis_fit(need)
                if need[CPUS] > room or not fits:
                    return
                free.take(host_id, self.pool, need)
                grants.append(Grant(spec.action_id, host_id, need))
                sandbox.running[action] = need[CPUS]
            sandbox.waiting.popleft()

    def _move_out(self, name: TrajectoryId, sandbox: _Sandbox) -> None:
        """The host is too small for an action of this trajectory: it gets a sandbox elsewhere."""
        del self._sandboxes[name], self._by_host[sandbox.host_id][name]
        self._reserved[sandbox.host_id] -= sandbox.reserved
        self._homeless.extend(sandbox.waiting)
        sandbox.waiting.clear()
