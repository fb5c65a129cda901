"""Which worker hosts an engine of which TP degree, and how that changes: the scheduler's side of `DeployEngines`.

Workers whose plugin waits for orders announce what they are. Changes come between batches and in two steps: every
engine that has to end has ended before a new one starts, since it may need the same GPUs. A worker that dies and comes
back under its name gets its order again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from heddle_dask.strategies.tp_degrees.assignment import EngineAssignment, EngineWorker, Node, nodes_of

# What a worker is to host, and the whole engine spec as a mapping.
Order = tuple[EngineAssignment, Mapping[str, Any]]


class EngineDeployment:
    """The scheduler's register of engine workers and of what each has to host.

    Parameters
    ----------
    tell
        Sends an engine spec, or None for no engine, to the worker at an address; returns when its old engine has
        ended. Raises OSError when the worker has gone.
    retire
        Takes the engine of the worker at an address out of use.
    """

    def __init__(
        self, tell: Callable[[str, Mapping[str, Any] | None], Awaitable[Any]], retire: Callable[[str], None]
    ) -> None:
        self._tell = tell
        self._retire = retire
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
        return nodes_of(self._workers.values())

    @property
    def assignments(self) -> list[EngineAssignment]:
        """The engines that are deployed."""
        return [assignment for assignment, _ in self._orders.values()]

    async def report(self) -> Mapping[str, Any]:
        """RPC of the driver: fields of each `EngineWorker` (`workers`) and `EngineAssignment` (`assignments`)."""
        return {
            "workers": [list(astuple(worker)) for worker in self._workers.values()],
            "assignments": [list(astuple(assignment)) for assignment in self.assignments],
        }

    async def clear(self) -> Mapping[str, Any]:
        """RPC of the driver: end all engines and forget the workers; each announces itself to a new plugin."""
        await self.deploy([])
        self._workers.clear()
        return {}

    async def deploy(self, orders: Iterable[Order]) -> list[str]:
        """Let exactly these engines run, and return the names of the workers whose engine changes.

        Returns when the old engines have ended. An engine whose order has not changed is left alone.
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
        await self._tell_all({address: None for address in changed})
        await self._tell_all(
            {address: wanted[name][1] for address, name in changed.items() if name in wanted}
        )
        return sorted(changed.values())

    def on_worker(self, worker: str, name: str, node: str, units: int, gpus: Sequence[str]) -> None:
        """A worker waits for orders; one that has come back gets what it had."""
        self._workers[worker] = EngineWorker(name, node, units, tuple(gpus))
        order = self._orders.get(name)
        if order is not None:
            task = asyncio.ensure_future(self._tell_all({worker: order[1]}))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    def started(self, tp_degree: int, start_s: float) -> None:
        """An engine of this TP degree has taken so long to start; 0 where it was not measured."""
        if start_s > 0:
            self.start_s[tp_degree] = max(start_s, self.start_s.get(tp_degree, 0.0))

    def forget_worker(self, worker: str) -> None:
        """A worker has left; its order stays for the case that it comes back."""
        self._workers.pop(worker, None)

    async def _tell_all(self, specs: Mapping[str, Mapping[str, Any] | None]) -> None:
        await asyncio.gather(*(self._tell_one(address, spec) for address, spec in specs.items()))

    async def _tell_one(self, address: str, spec: Mapping[str, Any] | None) -> None:
        try:
            await self._tell(address, spec)
        except (OSError, AttributeError):
            # The worker has left, or lost its plugin: Dask reports it, and its engine has ended with it.
            self._workers.pop(address, None)
