"""A fixed pool of workers for every kind of action: a baseline."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.opponents.fixed_units import fixed_amounts
from heddle_dask.core.entities import Action
from heddle_dask.core.transitions import ActionState
from heddle_dask.core.view import ClusterView, Grant
from heddle_dask.strategies.actions.free_resources import FreeResources


@dataclass(slots=True)
class _KindPool:
    """Running and waiting actions of one kind."""

    workers: int
    units: int
    waiting: deque[Action] = field(default_factory=deque)
    running: dict[Action, None] = field(default_factory=dict)


@dataclass(slots=True)
class WorkerPools:
    """Each kind of action has so many workers of a fixed size, whatever the others leave idle.

    Parameters
    ----------
    workers
        Workers of a kind that `kinds` does not name; at least 1. The number to be tuned.
    units
        Units of the elastic resource of each worker.
    kinds
        Workers and units by kind, ``reward:32x8/shell:64x1``; empty: the same for all.
    """

    workers: int = 16
    units: int = 1
    kinds: str = ""
    _pools: dict[str, _KindPool] = field(init=False, compare=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("workers", "units"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}: use a whole number of at least 1")
        for part in filter(None, self.kinds.split("/")):
            kind, _, size = part.rpartition(":")
            workers, _, units = size.partition("x")
            if not (kind and workers.isdecimal() and units.isdecimal() and int(workers) and int(units)):
                raise ValueError(f"kinds has {part!r}: use KIND:WORKERSxUNITS, joined by /")
            self._pools[kind] = _KindPool(int(workers), int(units))

    def allocate(self, view: ClusterView) -> Sequence[Grant]:
        """Grants for the oldest actions of each kind that has an idle worker."""
        for action in view.new_actions:
            label = action.spec.label
            pool = self._pools.setdefault(label, _KindPool(self.workers, self.units))
            pool.waiting.append(action)
        free = FreeResources(view)
        grants: list[Grant] = []
        for pool in self._pools.values():
            if pool.waiting:
                pool.running = {each: None for each in pool.running if each.state is ActionState.RUNNING}
                self._start(free, pool, grants)
        return grants

    def _start(self, free: FreeResources, pool: _KindPool, grants: list[Grant]) -> None:
        while pool.waiting and len(pool.running) < pool.workers:
            action = pool.waiting[0]
            spec = action.spec
            if action.state is ActionState.WAITING:
                need = fixed_amounts(free, spec.pool, spec.demand, pool.units)
                host_id = free.place(action, need)
                if host_id is None:
                    return
                free.take(host_id, spec.pool, need)
                grants.append(Grant(spec.action_id, host_id, need))
                pool.running[action] = None
            pool.waiting.popleft()
