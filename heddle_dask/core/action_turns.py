"""Actions of several runs: in which order they are offered to the allocation, and what their runs are charged."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

from heddle_dask.core.entities import Action
from heddle_dask.core.ids import RunId
from heddle_dask.core.resources import Resources, api_of
from heddle_dask.core.state import State

_KIND = "actions"


def run_of_action(state: State, action: Action) -> RunId:
    """The run of an action that has not ended."""
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
    shares = shares_of(state, action.spec.demand.least)
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
        least = action.spec.demand.least
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
