"""The GPUs of engines that start with their workers: each engine of a node gets its own.

A worker asks when it is about to start an engine that uses GPUs; the first to ask gets the first free ones. Engines of
planned TP degrees get theirs from the plan (`live.scheduler.deployment`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.live.wire.worker_messages import EngineWorkerReport
from heddle_dask.strategies.tp_degrees.assignment import EngineWorker, free_gpus


class GpuSeats:
    def __init__(
        self,
        # Sends an engine spec to the worker at an address. Raises OSError when the worker has gone.
        host_engine: Callable[[str, Mapping[str, Any]], Awaitable[Any]],
        # Takes the address of a worker for which no GPUs are left, and one line. It gets GPUs when others become free.
        refuse: Callable[[str, str], None],
    ) -> None:
        self._host_engine = host_engine
        self._refuse = refuse
        self._asked: dict[str, EngineWorkerReport] = {}
        self._taken: dict[str, tuple[str, ...]] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def taken(self) -> Mapping[str, tuple[str, ...]]:
        """The GPUs of each worker that has some, by its address."""
        return self._taken

    def worker_asks(self, worker: str, report: EngineWorkerReport) -> None:
        """A worker wants to start the engine `report.wants`; it has none now."""
        self._drop(worker)
        self._asked[worker] = report
        self._seat()

    def forget_worker(self, worker: str) -> None:
        """A worker has left, and its engine with it."""
        self._drop(worker)
        self._seat()

    def clear(self) -> None:
        """Forget all: their plugins are being replaced."""
        self._asked.clear()
        self._taken.clear()

    def _drop(self, worker: str) -> None:
        self._asked.pop(worker, None)
        self._taken.pop(worker, None)

    def _seat(self) -> None:
        for worker, report in self._asked.items():
            if worker in self._taken or report.wants is None:
                continue
            there = {gpu for other, gpus in self._taken.items() if self._same_node(other, report) for gpu in gpus}
            asking = EngineWorker(report.name, report.node, report.units, report.gpus)
            try:
                gpus = free_gpus(asking, int(report.wants["tp_degree"]), there)
            except BadInput as error:
                self._refuse(worker, str(error))
                continue
            self._taken[worker] = gpus
            task = asyncio.ensure_future(self._order(worker, {**report.wants, "devices": list(gpus)}))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    def _same_node(self, worker: str, report: EngineWorkerReport) -> bool:
        return self._asked[worker].node == report.node

    async def _order(self, worker: str, spec: Mapping[str, Any]) -> None:
        try:
            await self._host_engine(worker, spec)
        except (OSError, AttributeError):
            # The worker has left, or lost its plugin: Dask reports that, and its engine has ended with it.
            self._drop(worker)
