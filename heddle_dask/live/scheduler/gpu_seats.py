"""The GPUs of a node, shared out to all that ask for some: engines, the ranks of a trainer, model services.

An engine that starts with its worker asks and waits, the first to ask gets the first free ones, and one that found too
few gets those that become free. A trainer and a host of model services ask and are granted theirs or refused. Engines
of planned TP degrees get theirs from the plan (`live.scheduler.deployment`), which takes none that are seated here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.live.wire.worker_messages import EngineWorkerReport, GpuHolder, TakeGpus

ENGINE: GpuHolder = "engine"
_ASKER: Mapping[GpuHolder, str] = {
    "engine": "an engine",
    "trainer": "a trainer",
    "services": "a host of model services",
}
Asker = tuple[str, GpuHolder]  # the address of a worker, and for what it asks


@dataclass(frozen=True, slots=True)
class Seat:
    """GPUs that an asker has, each with at most `sharers` askers of its description."""

    node: str
    gpus: tuple[str, ...]
    sharers: int = 1


def free_gpus(visible: Sequence[str], count: int, sharers: int, seats: Collection[Seat]) -> tuple[str, ...]:
    """The GPUs that one more asker may have, at most `count`: those with a place left before empty ones.

    Parameters
    ----------
    seats
        Those of the node.
    """
    holders = {gpu: [seat.sharers for seat in seats if gpu in seat.gpus] for gpu in visible}
    begun = [gpu for gpu, others in holders.items() if 0 < len(others) < sharers and set(others) == {sharers}]
    return (*begun, *(gpu for gpu, others in holders.items() if not others))[:count]


class GpuSeats:
    def __init__(
        self,
        # Sends an engine spec to the worker at an address. Raises OSError when the worker has gone.
        host_engine: Callable[[str, Mapping[str, Any]], Awaitable[Any]],
        # Takes the address of a worker and why no GPUs are left for it, in one line; empty when it has some after all.
        refuse: Callable[[str, str], None],
        # The GPUs of a node on which planned engines run.
        planned: Callable[[str], Collection[str]] = lambda node: (),
    ) -> None:
        self._host_engine = host_engine
        self._refuse = refuse
        self._planned = planned
        self._asked: dict[str, EngineWorkerReport] = {}
        self._seats: dict[Asker, Seat] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def taken(self) -> Mapping[Asker, tuple[str, ...]]:
        return {asker: seat.gpus for asker, seat in self._seats.items()}

    def seated_on(self, node: str) -> set[str]:
        return {gpu for seat in self._seats.values() if seat.node == node for gpu in seat.gpus}

    def worker_asks(self, worker: str, report: EngineWorkerReport) -> None:
        """A worker wants to start the engine `report.wants`; it has none now."""
        self._drop(worker, ENGINE)
        self._asked[worker] = report
        self._seat_engines()

    def take(self, request: TakeGpus) -> tuple[str, ...]:
        """The GPUs of a trainer or of model services, in place of those that it had.

        Raises
        ------
        BadInput
            Too few are free.
        """
        asker = (request.asker, request.holder)
        self._seats.pop(asker, None)
        seat = self._found(request.name, request.node, request.gpus, request.count, 1, request.holder)
        self._seats[asker] = seat
        return seat.gpus

    def give_back(self, worker: str, holder: GpuHolder) -> None:
        """What a worker had for this is free."""
        self._drop(worker, holder)
        self._seat_engines()

    def forget_worker(self, worker: str) -> None:
        """A worker has left, and all that ran there with it."""
        for holder in _ASKER:
            self._drop(worker, holder)
        self._seat_engines()

    def clear(self) -> None:
        """Forget the engines: their plugins are being replaced."""
        for worker in list(self._asked):
            self._drop(worker, ENGINE)

    def _drop(self, worker: str, holder: GpuHolder) -> None:
        if holder == ENGINE:
            self._asked.pop(worker, None)
        self._seats.pop((worker, holder), None)

    def _seat_engines(self) -> None:
        for worker, report in self._asked.items():
            if (worker, ENGINE) in self._seats or report.wants is None:
                continue
            count, sharers = int(report.wants["tp_degree"]), int(report.wants.get("engines_per_gpu", 1))
            try:
                seat = self._found(report.name, report.node, report.gpus, count, sharers, ENGINE)
            except BadInput as error:
                self._refuse(worker, str(error))
                continue
            self._seats[worker, ENGINE] = seat
            self._refuse(worker, "")
            task = asyncio.ensure_future(self._order(worker, {**report.wants, "devices": list(seat.gpus)}))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    def _found(self, name: str, node: str, visible: Sequence[str], count: int, sharers: int, holder: GpuHolder) -> Seat:
        there = [seat for seat in self._seats.values() if seat.node == node]
        there.append(Seat(node, tuple(self._planned(node))))
        gpus = free_gpus(visible, count, sharers, there)
        if len(gpus) == count:
            return Seat(node, gpus, sharers)
        seen = f"{len(visible)} GPU(s)" + (f" ({', '.join(visible)})" if visible else "")
        others = sorted({f"{other}s" if other != "services" else "model services" for _, other in self._others(node)})
        raise BadInput(
            f"{_ASKER[holder]} of {count} GPU(s) on {node} finds {len(gpus)} free: worker {name} sees {seen}, "
            f"{' and '.join(others) or 'engines'} have the rest; start fewer engines, or set CUDA_VISIBLE_DEVICES"
        )

    def _others(self, node: str) -> list[Asker]:
        return [asker for asker, seat in self._seats.items() if seat.node == node]

    async def _order(self, worker: str, spec: Mapping[str, Any]) -> None:
        try:
            await self._host_engine(worker, spec)
        except (OSError, AttributeError):
            # The worker has left, or lost its plugin: Dask reports that, and its engine has ended with it.
            self._drop(worker, ENGINE)
