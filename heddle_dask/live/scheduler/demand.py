"""The work that waits and what each worker holds, for the cluster object that starts and ends workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Any

from distributed import Scheduler

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.resources import CPUS, GPUS
from heddle_dask.core.state import State
from heddle_dask.core.transitions import OVER, EngineState, TrajectoryState
from heddle_dask.live.scheduler.engine_registry import EngineRegistry
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.cluster_messages import Demand, QueuedCapacity, WorkerLoad
from heddle_dask.live.wire.messages import ENGINE_RESOURCE, TOOL_RESOURCE

# Of a trajectory of which nothing is known, and of a tool of which no call has ended.
_UNKNOWN_TOKENS = 1000.0
_UNKNOWN_TOOL_S = 1.0


class AnnouncedQueue:
    """What the cluster object says that it has queued; nothing once it has been silent for too long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queued = QueuedCapacity()
        self._until_s = 0.0

    def announce(self, queued: QueuedCapacity, valid_s: float) -> None:
        """Take what the cluster object has told."""
        self._queued, self._until_s = queued, self._clock() + valid_s

    @property
    def now(self) -> QueuedCapacity:
        return self._queued if self._clock() < self._until_s else QueuedCapacity()


def demand_of(
    scheduler: Scheduler, registry: EngineRegistry, state: State | None, draining: Container[str] = ()
) -> Demand:
    """Count the work of a session (None: there is none) and the loads of all workers; O(trajectories + workers).

    Parameters
    ----------
    draining
        Addresses of the workers that drain.
    """
    loads = worker_loads(scheduler, registry, state, draining)
    if state is None:
        return Demand(False, tool_cpus=registry.tool_cpus, workers=loads)
    open_tokens, waiting_tokens = token_work(state)
    waiting = [state.actions[name] for name in (*state.waiting_actions, *state.unplaced_actions)]
    # More tool workers help neither what waits for GPUs nor what waits for the quota of an API.
    demands = [(action, action.spec.demand.least) for action in waiting]
    waiting = [a for a, least in demands if not least[GPUS] and state.apis.admits(least, state.at)]
    cpus = [max(1, action.spec.demand[CPUS].least) for action in waiting]
    seconds = [state.tool_seconds.mean_s([action.spec.label]) or _UNKNOWN_TOOL_S for action in waiting]
    ready = state.ready_engines
    return Demand(
        session_open=True,
        trajectories=sum(t.state not in OVER for t in state.trajectories.values()),
        open_tokens=open_tokens,
        waiting_tokens=waiting_tokens,
        sampled_tokens=state.sampled_tokens,
        generating=sum(engine.generating > 0 for engine in ready),
        engines=len(ready),
        idle_engines=sum(engine.has_no_work(state.at) for engine in ready),
        slots=sum(engine.spec.slots for engine in ready),
        waiting_tool_cpus=sum(cpus),
        waiting_tool_cpu_s=sum(c * s for c, s in zip(cpus, seconds, strict=True)),
        busy_tool_cpus=sum(host.spec.cpus - host.free_cpus for host in state.hosts.values()),
        tool_cpus=sum(host.spec.cpus for host in state.hosts.values()),
        workers=loads,
    )


def token_work(state: State) -> tuple[float, float]:
    """Tokens that all trajectories will still generate, and those of the ones that wait for an engine.

    A trajectory without a prediction counts as the mean of the others.
    """
    live = [t for t in state.trajectories.values() if t.state not in OVER]
    known = {t.trajectory_id: left for t in live if (left := t.remaining_tokens()) is not None}
    mean = sum(known.values()) / len(known) if known else _UNKNOWN_TOKENS
    waiting = [t for t in live if _waits(t, state)]
    return tuple(sum(known.get(t.trajectory_id, mean) for t in some) for some in (live, waiting))  # type: ignore[return-value]


def _waits(trajectory: Trajectory, state: State) -> bool:
    return (
        trajectory.state in (TrajectoryState.SUBMITTED, TrajectoryState.QUEUED)
        or trajectory.trajectory_id in state.waiting_steps
    )


def worker_loads(
    scheduler: Scheduler, registry: EngineRegistry, state: State | None, draining: Container[str] = ()
) -> tuple[WorkerLoad, ...]:
    serves: dict[str, bool] = {}
    residents: dict[str, list[int]] = {}
    for engine_id, (address, _) in registry.engines.items():
        engine = None if state is None else state.engines.get(engine_id)
        serves[address] = engine is None or engine.state in (EngineState.READY, EngineState.LOADING)
        if engine is not None:
            held = residents.setdefault(address, [0, 0, 0])
            held[0] += len(engine.residents) + len(engine.reserved)
            held[1] += engine.resident_tokens
            held[2] += len(engine.inflight)
    for host_id, (address, _) in registry.hosts.items():
        serves[address] = True
        host = None if state is None else state.hosts.get(host_id)
        residents.setdefault(address, [0, 0, 0])[2] += 0 if host is None else len(host.running)
    return tuple(
        _load(
            worker,
            serves.get(worker.address, False),
            registry.start_failures.get(worker.address, ""),
            worker.address in draining,
            *residents.get(worker.address, (0, 0, 0)),
        )
        for worker in scheduler.workers.values()
    )


def _load(
    worker: Any, serves: bool, trouble: str, drains: bool, residents: int, resident_tokens: int, busy: int
) -> WorkerLoad:
    tagged = {ENGINE_RESOURCE, TOOL_RESOURCE} & set(worker.resources)
    return WorkerLoad(
        name=str(worker.name),
        serves=serves or not tagged,
        # A worker that has just begun a task is not in the controller's counts of engines yet.
        busy=max(busy, len(worker.processing)),
        residents=residents,
        resident_tokens=resident_tokens,
        results=dask.results_needed(worker),
        trouble=trouble,
        drains=drains,
    )
