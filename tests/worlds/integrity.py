"""Recomputes every index of `State` from the records and compares; tests call it after every event."""

from __future__ import annotations

import math
from typing import Final

from heddle_dask.core.gpu_chunks import GpuChunk
from heddle_dask.core.ids import HostId
from heddle_dask.core.quotas import calls_of
from heddle_dask.core.resources import GPUS, MEMORY, api_of
from heddle_dask.core.service_copies import ServiceCopy
from heddle_dask.core.state import State
from heddle_dask.core.transitions import (
    OVER,
    ActionState,
    EngineState,
    KvState,
    TrajectoryState,
    WeightsState,
)

_INFLIGHT: Final = frozenset({TrajectoryState.QUEUED, TrajectoryState.GENERATING})
_OUTSIDE: Final = frozenset({TrajectoryState.SUBMITTED, *OVER})


def check_integrity(state: State) -> None:
    """Recompute every index and compare.

    Raises
    ------
    AssertionError
        An index differs; the message, if any, is the id of the trajectory, engine or host.
    """
    _check_trajectories(state)
    _check_engines(state)
    _check_runs(state)
    _check_lists(state)
    _check_hosts(state)
    _check_copies(state)
    _check_sandboxes(state)
    _check_actions(state)


def _check_trajectories(state: State) -> None:
    """Trajectories with their steps, actions and reservations."""
    for t in state.trajectories.values():
        assert (t.counted_on is not None) == (t.state in _INFLIGHT), t.trajectory_id
        assert t.counted_on is not None or not t.leaving, t.trajectory_id
        mine = [a for a in state.actions.values() if a.spec.trajectory_id == t.trajectory_id]
        assert sorted(t.open_labels) == sorted(a.spec.label for a in mine), t.trajectory_id
        assert t.home is None or t.home in state.engines, t.trajectory_id
        assert t.bound_for is None or t.trajectory_id in state.engines[t.bound_for].taking, t.trajectory_id
        assert t.state is not TrajectoryState.ENDED or t.actions_open > 0
        assert t.state not in OVER or (t.home is None and t.step is None), t.trajectory_id
    reserving = [t for t in state.trajectories.values() if t.reserved_on is not None]
    assert state.reservations == len(reserving)
    assert all(t.home is None and t.state not in (*_INFLIGHT, *OVER) for t in reserving)
    assert state.alive == sum(t.state not in _OUTSIDE for t in state.trajectories.values())
    for t in state.trajectories.values():
        assert not t.held or t.state is TrajectoryState.QUEUED, t.trajectory_id


def _check_engines(state: State) -> None:
    """Sums and lists of every engine."""
    for engine in state.engines.values():
        living = [t for t in state.trajectories.values() if t.home == engine.engine_id]
        here = [t for t in living if t.state in _INFLIGHT]
        name = engine.engine_id
        assert all(state.trajectories[taken].bound_for == name for taken in engine.taking), name
        assert sorted(engine.residents) == sorted(t.trajectory_id for t in living), name
        assert engine.resident_tokens == sum(t.context_tokens for t in living), name
        assert engine.expected_tokens == sum(t.expected_tokens for t in living), name
        reserved = [t for t in state.trajectories.values() if t.reserved_on == name]
        assert sorted(engine.reserved) == sorted(t.trajectory_id for t in reserved), name
        assert math.isclose(engine.reserved_tokens, sum(t.reserved_tokens for t in reserved), abs_tol=1e-6), name
        assert not reserved or engine.state is EngineState.READY, name
        assert sorted(engine.inflight) == sorted(t.trajectory_id for t in here), name
        assert engine.inflight_tokens == sum(t.counted_tokens for t in here), name
        generating = sum(t.state is TrajectoryState.GENERATING for t in here)
        assert engine.generating == generating, name
        assert engine.stopping == sum(t.stopping for t in here), name
        runs = [t for t in here if t.state is TrajectoryState.GENERATING and not t.stopping]
        started = [*engine.running, *engine.ahead]
        assert sorted(started) == sorted(t.trajectory_id for t in runs), name
        occupied = len(engine.running) + engine.stopping
        assert not engine.ahead or occupied >= engine.spec.slots, name
        # A lost engine is the home only of trajectories with a step that has yet to report.
        if engine.state is EngineState.LOST:
            assert sorted(engine.residents) == sorted(engine.inflight), name
        assert engine.state is not EngineState.DRAINED or not engine.residents, name
        # An engine that is about to end is left as soon as nothing runs or moves.
        moving = [t for t in living if t.kv is KvState.MOVING]
        assert not engine.expiring or len(engine.residents) == len(here) + len(moving), name
        fed = [state.trajectories[name] for name in engine.feeding] if engine.engine_id in state.draining else []
        assert all(t.state is TrajectoryState.QUEUED and t.home != name for t in fed), name
        assert engine.held == sum(t.held for t in here), name


def _check_runs(state: State) -> None:
    """Sums of every run."""
    for run_id, run in state.runs.items():
        mine = [t for t in state.trajectories.values() if t.spec.run_id == run_id]
        alive = [t for t in mine if t.state not in _OUTSIDE]
        assert run.alive == len(alive), run_id
        assert run.expected_tokens == sum(t.expected_tokens for t in alive), run_id
        assert run.reservations == sum(t.reserved_on is not None for t in mine), run_id
        assert run.held == sum(t.held for t in mine), run_id
        waiting = [t.trajectory_id for t in mine if t.state is TrajectoryState.SUBMITTED and not t.cancelled]
        assert sorted([*run.unadmitted, *run.without_credit]) == sorted(waiting), run_id
        if run.ledger is not None:
            run.ledger.check_integrity()
        kv_tokens = sum((t.home is not None) * t.context_tokens + t.reserved_tokens for t in mine)
        assert math.isclose(run.kv_tokens, kv_tokens, abs_tol=1e-6), run_id


def _check_lists(state: State) -> None:
    """Lists over all trajectories and engines."""
    draining = [i for i, e in state.engines.items() if e.state is EngineState.DRAINING]
    assert sorted(state.draining) == sorted(draining)
    ready = [e for e in state.engines.values() if e.state is EngineState.READY]
    assert list(state.ready_engines) == ready
    assert state.least_max_context == min((e.spec.max_context_tokens for e in ready), default=0)
    by_id = state.trajectories.items()
    waiting = sorted(i for i, t in by_id if t.state is TrajectoryState.WAITING)
    assert sorted(state.waiting_steps) == waiting
    alive = [t for t in state.trajectories.values() if t.state not in _OUTSIDE]
    assert state.alive == len(alive)
    assert state.expected_tokens == sum(t.expected_tokens for t in alive)
    uncredited = [name for run in state.runs.values() for name in run.without_credit]
    submitted = sorted(i for i, t in by_id if t.state is TrajectoryState.SUBMITTED and not t.cancelled)
    assert sorted([*state.unadmitted, *uncredited]) == submitted
    closed = [e for e in state.engines.values() if e.weights.waits_for_moves]
    assert all(e.weights.state is WeightsState.FETCHED for e in closed)


def _check_hosts(state: State) -> None:
    """What hosts have left."""
    for host in state.hosts.values():
        free = dict(host.spec.resources)
        for resource, amount in (pair for a in host.running for pair in state.actions[a].resources):
            if api_of(resource) is None and resource != GPUS:
                free[resource] = free.get(resource, 0) - amount
        if GPUS in free:
            free[GPUS] = host.gpus.free_gpus
        boxes = [box for box in state.sandboxes.values() if box.host == host.spec.host_id]
        assert sorted(host.sandboxes) == sorted(box.name for box in boxes), host.spec.host_id
        if any(box.reserved_bytes for box in boxes):
            free[MEMORY] = free.get(MEMORY, 0) - sum(box.reserved_bytes for box in boxes)
        assert free == host.free and min(free.values(), default=0) >= 0, host.spec.host_id
        assert host.released == (host.draining and not host.running), host.spec.host_id


def _check_copies(state: State) -> None:
    """Copies of services against hosts, and against the actions on them."""
    of_hosts: dict[str, dict[tuple[HostId, GpuChunk], ServiceCopy]] = {}
    for name, host in state.hosts.items():
        host.gpus.check_integrity()
        for copy in host.gpus.copies.values():
            assert copy.host_id == name
            of_hosts.setdefault(copy.service, {})[name, copy.chunk] = copy
    assert state.copies_of == of_hosts
    copies = [copy for of_service in of_hosts.values() for copy in of_service.values()]
    placed = sorted(i for copy in copies for i in (*copy.waiting, *copy.running))
    assert placed == sorted(i for i, a in state.actions.items() if a.copy is not None)
    for copy in copies:
        for expected, names in ((ActionState.LOADING, copy.waiting), (ActionState.RUNNING, copy.running)):
            mine = [state.actions[name] for name in names]
            assert all(a.copy is copy and a.host == copy.host_id and a.state is expected for a in mine)
            assert all(a.spec.service == copy.service for a in mine)
            assert all(copy.chunk.gpus == a.resources[GPUS] for a in mine)
    queued = [i for i in state.waiting_actions if state.actions[i].spec.service]
    assert sorted(queued) == sorted(i for queue in state.service_queues.values() for i in queue)
    for service, queue in state.service_queues.items():
        assert list(queue) == [i for i in queued if state.actions[i].spec.service == service]


def _check_sandboxes(state: State) -> None:
    """Sandboxes, and the actions that wait for theirs."""
    unstarted = [i for i, a in state.actions.items() if a.state is ActionState.WAITING]
    for box in state.sandboxes.values():
        assert box.closing == (box.name in state.closing_sandboxes), box.name
        assert box.closing or box.name in state.trajectories[box.trajectory_id].sandboxes, box.name
        assert box.open_actions == sum(a.spec.sandbox == box.name for a in state.actions.values()), box.name
        assert box.host is None or not state.hosts[box.host].draining, box.name
        assert box.host is not None or box.reserved_bytes == 0, box.name
    for action in (state.actions[i] for i in unstarted):
        place = state.sandboxes[action.spec.sandbox].host if action.spec.sandbox else None
        assert action.host_fixed == place, action.spec.action_id
        unplaced = bool(action.spec.sandbox) and place is None
        assert unplaced == (action.spec.action_id in state.unplaced_actions), action.spec.action_id


def _check_actions(state: State) -> None:
    """Actions that run and wait, and the calls of APIs."""
    placed = (ActionState.LOADING, ActionState.RUNNING)
    running = sorted(i for i, a in state.actions.items() if a.state in placed)
    assert running == sorted(i for host in state.hosts.values() for i in host.running)
    unstarted = [i for i, a in state.actions.items() if a.state is ActionState.WAITING]
    queued_names = [*state.waiting_actions, *state.delayed_actions, *state.unplaced_actions]
    assert sorted(queued_names) == sorted(unstarted)
    for api_name, api in state.apis.apis.items():
        api.check_integrity()
        calls = {i: dict(calls_of(state.actions[i].resources)).get(api_name, 0) for i in running}
        assert api.running == {i: count for i, count in calls.items() if count}, api_name
        wanting = {i: dict(calls_of(state.actions[i].spec.demand.least)) for i in state.waiting_actions}
        assert sorted(api.waiting) == sorted(i for i, each in wanting.items() if api_name in each), api_name
        assert (api_name in state.apis.wanted) == bool(api.waiting), api_name
    assert set(state.new_actions) <= set(state.waiting_actions)
    assert set(state.freed_hosts) <= set(state.hosts)
    assert set(state.stranded) <= {*state.waiting_actions, *state.unplaced_actions}
    assert list(state.stranded.values()) == sorted(state.stranded.values())
