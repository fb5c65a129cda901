"""Which worker hosts an engine of which TP degree, and how that changes: the scheduler's side of `DeployEngines`.

Workers whose plugin waits for orders report their GPUs. Engines change between batches, in two steps: every engine that
has to end has ended before a new one starts, since both may need the same GPUs. A worker that dies and comes back under
its name gets its order again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any

from heddle_dask.live.wire.driver_messages import ClearEngines, DeployedEngines, GetDeployedEngines
from heddle_dask.live.wire.transport import Done
from heddle_dask.live.wire.worker_messages import EngineWorkerReport
from heddle_dask.strategies.tp_degrees.assignment import EngineAssignment, EngineWorker, Node, nodes_of

# The engine that a worker is to host, and its whole spec as a mapping.
Order = tuple[EngineAssignment, Mapping[str, Any]]


class EngineDeployment:
    def __init__(
        self,
        # Sends an engine spec, or None for no engine, to the worker at an address; returns when its old engine has
        # ended. Raises OSError when the worker has gone.
        host_engine: Callable[[str, Mapping[str, Any] | None], Awaitable[Any]],
        retire: Callable[[str], None],  # takes the engine of the worker at an address out of use
        # The GPUs of a node that are no engine's of a plan.
        reserved: Callable[[str], Collection[str]] = lambda node: (),
    ) -> None:
        self._host_engine = host_engine
        self._retire = retire
        self._reserved = reserved
        self._workers: dict[str, EngineWorker] = {}
        self._orders: dict[str, Order] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self.start_s: dict[int, float] = {}
        """The longest start of an engine, in seconds, by TP degree."""

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the workers that wait for orders.

        Raises
        ------
        BadInput
            As `nodes_of`.
        """
        return nodes_of(self._workers.values(), self._reserved)

    @property
    def assignments(self) -> list[EngineAssignment]:
        return [assignment for assignment, _ in self._orders.values()]

    def gpus_on(self, node: str) -> set[str]:
        there = {worker.name for worker in self._workers.values() if worker.node == node}
        return {gpu for assignment in self.assignments if assignment.worker in there for gpu in assignment.gpus}

    async def report(self, request: GetDeployedEngines) -> DeployedEngines:
        """The workers that wait for orders, and the engines that are deployed."""
        return DeployedEngines(
            tuple(worker.name for worker in self._workers.values()),
            tuple(assignment.tp_degree for assignment in self.assignments),
        )

    async def clear(self, request: ClearEngines) -> Done:
        """End all engines and forget the workers."""
        await self.deploy([])
        self._workers.clear()
        return Done()

    async def deploy(self, orders: Iterable[Order]) -> list[str]:
        """Let exactly these engines run, and return the names of the workers with another engine than before.

        Returns when the old engines have ended. An engine with an unchanged order is left alone.
        """
        wanted = {assignment.worker: (assignment, spec) for assignment, spec in orders}
        changed = {
            address: worker.name
            for address, worker in self._workers.items()
            if self._orders.get(worker.name) != wanted.get(worker.name)
        }
        self._orders = wanted
        for address in changed:
            self._retire(address)
        await self._order_all({address: None for address in changed})
        await self._order_all({address: wanted[name][1] for address, name in changed.items() if name in wanted})
        return sorted(changed.values())

    def worker_waits(self, worker: str, report: EngineWorkerReport) -> None:
        """A worker waits for orders; one that has come back gets its earlier order."""
        self._workers[worker] = EngineWorker(report.name, report.node, report.units, report.gpus)
        order = self._orders.get(report.name)
        if order is not None:
            task = asyncio.ensure_future(self._order_all({worker: order[1]}))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    def started(self, tp_degree: int, start_s: float) -> None:
        """An engine of this TP degree has taken so long to start; 0 where it was not measured."""
        if start_s > 0:
            self.start_s[tp_degree] = max(start_s, self.start_s.get(tp_degree, 0.0))

    def forget_worker(self, worker: str) -> None:
        """A worker has left; its order stays for the case that it comes back."""
        self._workers.pop(worker, None)

    async def _order_all(self, specs: Mapping[str, Mapping[str, Any] | None]) -> None:
        await asyncio.gather(*(self._order_one(address, spec) for address, spec in specs.items()))

    async def _order_one(self, address: str, spec: Mapping[str, Any] | None) -> None:
        try:
            await self._host_engine(address, spec)
        except (OSError, AttributeError):
            # The worker has left, or lost its plugin: Dask reports that, and its engine has ended with it.
            self._workers.pop(address, None)
