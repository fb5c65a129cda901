"""Results straight from the worker that is believed to hold them: one round trip instead of two.

Dask's own way asks the scheduler first who has a result. The driver usually knows: the next step of a trajectory ran
where the one before did. A wrong guess costs a round trip and is answered by Dask's way.
"""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import Client

from heddle_dask.live import _dask_internals as dask
from heddle_dask.live.messages import Key


class DirectFetch:
    """One per driver. At most one request per worker is under way; what comes meanwhile goes with the next."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._wanted: dict[str, dict[Key, asyncio.Future[Any]]] = {}
        self._drains: dict[str, asyncio.Task[None]] = {}

    async def get(self, key: Key, address: str) -> Any | None:
        """The result of `key`, or None when that worker does not have it or does not answer."""
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._wanted.setdefault(address, {})[key] = result
        if address not in self._drains:
            self._drains[address] = asyncio.create_task(self._drain(address))
        return await result

    async def _drain(self, address: str) -> None:
        try:
            while wanted := self._wanted.pop(address, None):
                try:
                    data = await dask.data_of(self._client, address, list(wanted))
                except OSError:
                    data = {}
                for key, result in wanted.items():
                    if not result.done():
                        result.set_result(data.get(key))
        finally:
            del self._drains[address]
