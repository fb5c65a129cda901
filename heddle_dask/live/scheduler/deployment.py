"""The scheduler's side of degrees: which worker hosts an engine of which degree, and how that changes.

Workers whose plugin waits for orders tell what they are; the driver orders seats (`live.degrees`). Changes come
between rollouts and in two strokes: every engine that is to go has ended before a new one starts, since it may need
the same GPUs. A worker that dies and comes back under its name gets its order again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

# A worker's name, its engine's degree and GPUs, and the whole spec as a mapping.
Order = tuple[str, int, tuple[str, ...], Mapping[str, Any]]


class Seating:
    """The scheduler's register of engine workers and of what each is to host.

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
        self._workers: dict[str, list[Any]] = {}
        self._orders: dict[str, Order] = {}
        self._start_s: dict[int, float] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    async def seats(self) -> Mapping[str, Any]:
        """RPC of the driver: the workers, what they are to host, and how long engines took to start.

        Returns
        -------
        Mapping
            ``workers``: fields of `EngineWorker`; ``seats``: fields of `Seat`; ``start_s``: pairs of a degree and the
            longest start of an engine of it.
        """
        return {
            "workers": list(self._workers.values()),
            "seats": [[name, degree, list(gpus)] for name, degree, gpus, _ in self._orders.values()],
            "start_s": [[degree, seconds] for degree, seconds in self._start_s.items()],
        }

    async def reseat(self, orders: Sequence[Sequence[Any]]) -> Mapping[str, Any]:
        """RPC of the driver: let exactly these engines run; returns when the old ones have ended.

        An engine whose order has not changed is left alone.
        Without any order the workers are forgotten, too: who waits says so when a plugin is registered anew.
        """
        wanted: dict[str, Order] = {
            name: (name, degree, tuple(gpus), spec) for name, degree, gpus, spec in orders
        }
        changed = {
            address: name
            for address, (name, *_) in self._workers.items()
            if self._orders.get(name) != wanted.get(name)
        }
        self._orders = wanted
        for address in changed:
            self._retire(address)
        await self._tell_all({address: None for address in changed})
        starting = {address: wanted[name][3] for address, name in changed.items() if name in wanted}
        await self._tell_all(starting)
        if not wanted:
            self._workers.clear()
        return {"changed": sorted(changed.values())}

    def on_seat(self, worker: str, name: str, node: str, units: int, gpus: Sequence[str]) -> None:
        """A worker waits for orders; one that has come back gets what it had."""
        self._workers[worker] = [name, node, units, list(gpus)]
        order = self._orders.get(name)
        if order is not None:
            task = asyncio.ensure_future(self._tell_all({worker: order[3]}))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    def started(self, degree: int, start_s: float) -> None:
        """An engine of this degree has taken so long to start; 0 when nobody measured."""
        if start_s > 0:
            self._start_s[degree] = max(start_s, self._start_s.get(degree, 0.0))

    def forget_worker(self, worker: str) -> None:
        """A worker has left; its order stays for the case that it comes back."""
        self._workers.pop(worker, None)

    async def _tell_all(self, specs: Mapping[str, Mapping[str, Any] | None]) -> None:
        await asyncio.gather(*(self._tell_one(address, spec) for address, spec in specs.items()))

    async def _tell_one(self, address: str, spec: Mapping[str, Any] | None) -> None:
        try:
            await self._tell(address, spec)
        except (OSError, AttributeError):
            # It has left, or lost its plugin: Dask says so by itself, and its engine has ended with it.
            self._workers.pop(address, None)
