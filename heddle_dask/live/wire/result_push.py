"""Results straight from worker to driver, before the scheduler has told that they exist.

Dask's own way to a result is two messages in a row: the scheduler's notice, then a fetch from the worker that holds it.
Here the driver keeps one question open at every worker it has heard of; the worker answers with each result the moment
it exists. Nothing depends on the push: whatever does not arrive is fetched Dask's way after the notice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping
from typing import Any

from distributed import Client

from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.messages import Key

# An open question is answered with nothing after so long, and asked again: a driver that died is forgotten.
POLL_S = 30.0
# Results kept for a driver that has not asked yet; older ones it fetches Dask's way.
KEPT_RESULTS = 256
# A result that is known to exist and not here by then is fetched. Far more than a push takes under load.
PATIENCE_S = 0.05


class Outbox:
    """The worker's end: results of each session, waiting for its driver's question."""

    def __init__(self) -> None:
        self._results: dict[str, deque[tuple[Key, Any]]] = {}
        self._news: dict[str, asyncio.Event] = {}

    def put(self, session: str, key: Key, result: Any) -> None:
        """Offer a result; it is sent at once when the driver's question is open."""
        if session not in self._results:
            # One session runs at a time: the results of an earlier one are not wanted any more.
            self._results.clear()
            self._results[session] = deque(maxlen=KEPT_RESULTS)
        self._results[session].append((key, result))
        if session in self._news:
            self._news[session].set()

    async def take(self, session: str) -> Mapping[str, Any]:
        """RPC of the driver: everything new, as soon as there is something."""
        if not self._results.get(session):
            news = self._news.setdefault(session, asyncio.Event())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), POLL_S)
            self._news.pop(session, None)
        results = self._results.pop(session, ())
        return {"results": dask.serialized(list(results))}


class Inbox:
    """The driver's end: one open question per worker and handler."""

    def __init__(self, client: Client, session: str) -> None:
        self._client = client
        self._session = session
        self._polls: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._expected: dict[Key, asyncio.Future[Any]] = {}

    def expect(self, key: Key) -> None:
        """Keep the result of this key when it arrives, until `forget`."""
        self._expected[key] = asyncio.get_running_loop().create_future()

    def forget(self, key: Key) -> None:
        """The result of this key is not wanted any more."""
        self._expected.pop(key, None)

    def arrival(self, key: Key) -> asyncio.Future[Any]:
        """Becomes done with the pushed result of an expected key, if that ever arrives."""
        return self._expected[key]

    def listens(self, handler: str) -> bool:
        """Whether a question of this kind is open at any worker."""
        return any(asked == handler for _, asked in self._polls)

    def listen(self, address: str, handler: str) -> None:
        """Keep a question open at this worker from now on."""
        if (address, handler) not in self._polls:
            self._polls[address, handler] = asyncio.create_task(self._poll(address, handler))

    async def _poll(self, address: str, handler: str) -> None:
        try:
            while True:
                answer = await dask.call_worker(self._client, address, handler, session=self._session)
                for key, result in answer["results"]:
                    arrival = self._expected.get(key)
                    if arrival is not None and not arrival.done():
                        arrival.set_result(result)
        except OSError:
            return  # the worker has left; if it comes back, it is heard of again
        finally:
            del self._polls[address, handler]

    async def close(self) -> None:
        """Ask nothing any more."""
        polls = list(self._polls.values())
        for poll in polls:
            poll.cancel()
        if polls:
            await asyncio.wait(polls)
