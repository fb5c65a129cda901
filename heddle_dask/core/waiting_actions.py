"""Actions that wait: what they demand, which workers can ever run them, and in which order they are offered.

Actions of several runs are offered to the allocation in the order of their runs' turns, and their runs are charged.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from heddle_dask.core.commands import Command, WakeUp
from heddle_dask.core.entities import Action, Host
from heddle_dask.core.gpu_chunks import chunk_size
from heddle_dask.core.ids import RunId
from heddle_dask.core.nouns import ActionRequest
from heddle_dask.core.resources import (
    GPUS,
    MEMORY,
    Amounts,
    ModelService,
    PoolMaximum,
    ResourceDemand,
    Resources,
    amount_text,
    api_of,
)
from heddle_dask.core.state import State


def on_chunks(request: ActionRequest, services: Mapping[str, ModelService]) -> tuple[ActionRequest, str]:
    """The request with amounts of GPUs that are sizes of chunks, and the pool of its service; or why it is refused.

    A request of a service without GPUs may use each size of the service. Beside another elastic resource, the number of
    GPUs is the smallest one.

    Returns
    -------
    The request, and one line that says why it can never run; empty: it may.
    """
    asked = request.demand[GPUS]
    wanted = _sizes(asked) if asked.most else set()
    pool = request.pool
    if request.service:
        service = services.get(request.service)
        if service is None:
            known = ", ".join(sorted(services)) or "none"
            return request, f"model service '{request.service}' is not declared (declared: {known})"
        supported = {chunk_size(gpus) for gpus in service.gpus}
        pool, sizes = service.pool, sorted(supported & wanted if wanted else supported)
        if not sizes:
            listed = ", ".join(map(str, sorted(supported)))
            return request, f"model service '{service.name}' runs on {listed} GPUs, not on {asked.least}"
    elif wanted:
        sizes = [size for size in sorted(wanted) if size in asked] or sorted(wanted)[:1]
    else:
        return request, ""
    if request.demand.elastic not in (None, GPUS):
        sizes = sizes[:1]
    amounts: dict[str, Amounts | int] = {name: each for name, each in request.demand if name != GPUS}
    amounts[GPUS] = Amounts(sizes[0], sizes[-1], tuple(sizes) if len(sizes) > 1 else ())
    return replace(request, pool=pool, demand=ResourceDemand.of(amounts)), ""


def _sizes(asked: Amounts) -> set[int]:
    """The chunks of these amounts; of a range, however wide, without counting through it."""
    if asked.only:
        return {chunk_size(gpus) for gpus in asked.only}
    sizes = {chunk_size(asked.least)}
    while (largest := max(sizes)) < asked.most:
        sizes.add(2 * largest)
    return sizes


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
        least, known = action.least, self.state.pool_maxima.get(action.spec.pool, ())
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
        return any(self.state.sandboxes[name].host is not None for name in mine if name != action.spec.sandbox)

    def _can_run_now(self, action: Action) -> bool:
        key = (action.spec.pool, self._need(action))
        found = self._runs_now.get(key)
        if found is None:
            pool, need = key
            hosts = self.state.hosts.values()
            found = any(h.spec.pool == pool and not h.draining and covers(h.spec.resources, need) for h in hosts)
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


_KIND = "actions"


def run_of_action(state: State, action: Action) -> RunId:
    return state.trajectories[action.spec.trajectory_id].spec.run_id


def shares_of(state: State, resources: Resources) -> dict[str, float]:
    """The share of the cluster's amount of each of these resources; of an API, that of its concurrent calls."""
    totals: Counter[str] = Counter()
    for host in state.hosts.values():
        totals.update(dict(host.spec.resources))
    for name, _ in resources:
        api = api_of(name)
        if api is not None:
            known = state.apis.apis.get(api)
            totals[name] = 0 if known is None else known.quota.concurrency
    return {name: amount / totals[name] for name, amount in resources if totals[name]}


def turn_cost(state: State, action: Action) -> float:
    """By how much the turn of a run grows when this action of it starts with the least of everything."""
    shares = shares_of(state, action.least)
    return state.fair.cost(run_of_action(state, action), _KIND, shares)


def actions_in_turn(state: State, actions: Iterable[Action]) -> list[Action]:
    """These actions, runs taking turns by what each action would add to their accounts; oldest first in each run.

    O(n log r) for n actions of r runs.
    """
    of_run: dict[RunId, list[Action]] = {}
    for action in actions:
        of_run.setdefault(run_of_action(state, action), []).append(action)
    if len(of_run) < 2:
        return [action for mine in of_run.values() for action in mine]
    costs: dict[tuple[RunId, Resources], float] = {}
    heap = [(state.fair.turn(run_id), run_id, 0) for run_id in of_run]
    heapq.heapify(heap)
    ordered: list[Action] = []
    while heap:
        turn, run_id, number = heapq.heappop(heap)
        action = of_run[run_id][number]
        ordered.append(action)
        least = action.least
        if (run_id, least) not in costs:
            costs[run_id, least] = state.fair.cost(run_id, _KIND, shares_of(state, least))
        if number + 1 < len(of_run[run_id]):
            heapq.heappush(heap, (turn + costs[run_id, least], run_id, number + 1))
    return ordered


class ActionTurns:
    """The accounts of runs for actions; does nothing while only one run is open."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._waiting: frozenset[RunId] = frozenset()

    def allocating(self) -> None:
        """The allocation is about to be asked: a run that had no waiting action is not repaid."""
        if not self.state.is_shared:
            return
        actions = self.state.actions
        waiting = frozenset(run_of_action(self.state, actions[i]) for i in self.state.waiting_actions)
        for run_id in sorted(waiting - self._waiting):
            if self.state.runs[run_id].held == 0:
                others = [r for r, run in self.state.runs.items() if run.held or r in self._waiting]
                self.state.fair.begins_to_wait(run_id, others)
        self._waiting = waiting

    def started(self, action: Action) -> None:
        """Charge the run of an action that starts with what it was granted."""
        if self.state.is_shared:
            shares = shares_of(self.state, action.resources)
            run_id = run_of_action(self.state, action)
            self.state.fair.start(f"action {action.spec.action_id}", run_id, _KIND, shares, self.state.at)

    def ended(self, action: Action) -> None:
        """What an action was granted is free again."""
        self.state.fair.end(f"action {action.spec.action_id}", self.state.at)
