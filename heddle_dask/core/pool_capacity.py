"""Which actions the workers of a pool can ever run, and which no worker that is there now can run."""

from __future__ import annotations

from collections.abc import Iterable

from heddle_dask.core.commands import Command, WakeUp
from heddle_dask.core.entities import Action, Host
from heddle_dask.core.pools import PoolMaximum
from heddle_dask.core.resources import MEMORY, Resources, amount_text, api_of
from heddle_dask.core.state import State


def covers(most: Resources, need: Resources) -> bool:
    """Whether a host with these resources, when empty, has what is needed of resources that belong to hosts."""
    return all(most[name] >= amount for name, amount in need if api_of(name) is None)


class PoolCapacity:
    """Judges demands by the largest workers of a pool, seen or declared; and the time without a worker.

    An action that no such worker could run is hopeless. One that only workers of the past or of the future can run
    waits, `max_wait_s` seconds at most (0: without a bound).
    """

    def __init__(self, state: State, max_wait_s: float) -> None:
        self.state = state
        self.max_wait_s = max_wait_s
        self._runs_now: dict[tuple[str, Resources], bool] = {}  # until a host joins or leaves
        self._asked_s: float | None = None  # the time of the open `WakeUp`

    def declare(self, maxima: Iterable[PoolMaximum]) -> None:
        """Take the largest workers that a run may have."""
        for maximum in maxima:
            self._take_maximum(maximum.pool, maximum.resources)
            self.state.declared_pools[maximum.pool] = None

    def _take_maximum(self, pool: str, resources: Resources) -> None:
        known = self.state.pool_maxima.get(pool, ())
        if not any(covers(other, resources) for other in known):
            smaller = (other for other in known if not covers(resources, other))
            self.state.pool_maxima[pool] = (*smaller, resources)

    def hopeless(self, action: Action) -> str:
        """Why no worker will ever run this action; empty when one may."""
        pool, need = action.spec.pool, self._need(action)
        known = self.state.pool_maxima.get(pool)
        if known is None:
            pools = ", ".join(sorted({*self.state.pool_maxima}))
            unknown = bool(self.state.declared_pools)
            return f"no worker of pool {pool} has joined or is declared; pools: {pools}" if unknown else ""
        if any(covers(most, need) for most in known):
            return ""
        for name, amount in need:
            most = max(each[name] for each in known)
            if api_of(name) is None and most < amount:
                has = f"the largest worker of pool {pool} has {amount_text(name, most)}"
                return f"it needs {amount_text(name, amount)}; {has}"
        listed = ", ".join(amount_text(name, amount) for name, amount in need)
        return f"no worker of pool {pool} has all of: {listed}"

    def requested(self, action: Action, at: float) -> list[Command]:
        """Begin to count the time of an action that no present worker can run, or whose memory may never be free."""
        if not self.max_wait_s or (self._can_run_now(action) and not self._holds_and_waits(action)):
            return []
        self.state.stranded[action.spec.action_id] = at + self.max_wait_s
        return self._next_deadline()

    def host_joined(self, host: Host) -> None:
        """A worker has joined: what it can run is not stranded any more."""
        self._take_maximum(host.spec.pool, host.spec.resources)
        self.state.host_changes += 1
        self._runs_now.clear()
        for action_id in list(self.state.stranded):
            action = self.state.actions[action_id]
            if self._can_run_now(action) and not self._holds_and_waits(action):
                del self.state.stranded[action_id]

    def host_left(self, pool: str, at: float) -> list[Command]:
        """A worker drains or is lost: begin to count the time of what only it could run."""
        self.state.host_changes += 1
        self._runs_now.clear()
        names = (*self.state.waiting_actions, *self.state.unplaced_actions)
        waiting = [self.state.actions[action_id] for action_id in names]
        commands: list[Command] = []
        for action in waiting:
            if action.spec.pool == pool and action.spec.action_id not in self.state.stranded:
                commands += self.requested(action, at)
        return commands

    def _need(self, action: Action) -> Resources:
        """What a host must have when it is empty: with the memory of the sandbox, where hosts announce memory."""
        least, known = action.spec.demand.least, self.state.pool_maxima.get(action.spec.pool, ())
        if not action.spec.sandbox_memory_bytes or not any(each[MEMORY] for each in known):
            return least
        return Resources.of({**dict(least), MEMORY: least[MEMORY] + action.spec.sandbox_memory_bytes})

    def _holds_and_waits(self, action: Action) -> bool:
        """Whether its trajectory has a sandbox and waits for memory for another.

        Trajectories that do so could wait for one another for ever.
        """
        if action.spec.action_id not in self.state.unplaced_actions:
            return False
        mine = self.state.trajectories[action.spec.trajectory_id].sandboxes
        return any(
            self.state.sandboxes[name].host is not None for name in mine if name != action.spec.sandbox
        )

    def _can_run_now(self, action: Action) -> bool:
        key = (action.spec.pool, self._need(action))
        found = self._runs_now.get(key)
        if found is None:
            pool, need = key
            hosts = self.state.hosts.values()
            found = any(
                h.spec.pool == pool and not h.draining and covers(h.spec.resources, need) for h in hosts
            )
            self._runs_now[key] = found
        return found

    def overdue(self, at: float) -> list[tuple[Action, str]]:
        """Actions that have waited too long for a worker, each with the cause."""
        found: list[tuple[Action, str]] = []
        for action_id, deadline_s in self.state.stranded.items():  # in the order of their deadlines
            if deadline_s > at:
                break
            action = self.state.actions[action_id]
            lacked = (
                "had memory for one more sandbox of its trajectory"
                if self._can_run_now(action)
                else "that can run it was there"
            )
            cause = f"no worker of pool {action.spec.pool} {lacked} for {self.max_wait_s:g} s"
            found.append((action, cause))
        return found

    def time_reached(self, at: float) -> list[Command]:
        """Ask for the next time at which an action has waited too long; call it after giving up the overdue ones."""
        if self._asked_s is not None and at >= self._asked_s:
            self._asked_s = None
        return self._next_deadline()

    def _next_deadline(self) -> list[Command]:
        # One open question is enough: later actions have later deadlines.
        if self._asked_s is None:
            self._asked_s = next(iter(self.state.stranded.values()), None)
            return [] if self._asked_s is None else [WakeUp(self._asked_s)]
        return []
