"""Pushed results: from the worker to the driver, before the scheduler has told the driver that they exist.

Dask's own way to a result is two messages in a row: the scheduler's notice, then a fetch from the worker that holds it.
Here the driver keeps one long poll open at every worker that it has had a result from; the worker answers it with each
result the moment it exists. Nothing depends on the push: a result that does not arrive is fetched Dask's way after the
notice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from distributed import Client

from heddle_dask.live.wire.codec import Request
from heddle_dask.live.wire.messages import Key
from heddle_dask.live.wire.transport import ask_worker
from heddle_dask.live.wire.worker_messages import FetchActionResults, FetchStepResults, PushedAction, PushedStep

# A poll is answered with nothing after so long, and repeated: the worker forgets a driver that died.
POLL_S = 30.0
# Results kept for a driver that has not polled yet; it fetches older ones Dask's way.
KEPT_RESULTS = 256
# Sessions whose results are kept; those of the session that has been silent for longest are dropped first.
KEPT_SESSIONS = 16
# A result that exists and has not been pushed by then is fetched. Far more than a push takes under load.
PUSH_TIMEOUT_S = 0.05

FetchResults = type[FetchStepResults] | type[FetchActionResults]
Pushed = TypeVar("Pushed", PushedStep, PushedAction)


class Outbox(Generic[Pushed]):
    """The worker's end: results of each session that wait for the driver's poll."""

    def __init__(self) -> None:
        self._results: dict[str, deque[Pushed]] = {}
        self._arrived: dict[str, asyncio.Event] = {}

    def put(self, session: str, pushed: Pushed) -> None:
        """Offer a result; it is sent at once when the driver's poll is open."""
        results = self._results.pop(session, None)
        if results is None:
            results = deque(maxlen=KEPT_RESULTS)
            while len(self._results) >= KEPT_SESSIONS:
                del self._results[next(iter(self._results))]
        results.append(pushed)
        self._results[session] = results
        if session in self._arrived:
            self._arrived[session].set()

    async def take(self, session: str) -> tuple[Pushed, ...]:
        """All new results, as soon as there is one; empty after `POLL_S` seconds without."""
        if not self._results.get(session):
            arrived = self._arrived.setdefault(session, asyncio.Event())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(arrived.wait(), POLL_S)
            self._arrived.pop(session, None)
        return tuple(self._results.pop(session, ()))


class Inbox:
    """The driver's end: one open poll for each worker and kind of results."""

    def __init__(
        self,
        client: Client,
        session: str,
        # Takes the key and the result of what arrives without being expected.
        on_unexpected: Callable[[Key, Any], None] = lambda key, result: None,
    ) -> None:
        self._client = client
        self._session = session
        self._on_unexpected = on_unexpected
        self._polls: dict[tuple[str, FetchResults], asyncio.Task[None]] = {}
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

    def listens(self, kind: FetchResults) -> bool:
        """Whether a poll of this kind is open at any worker."""
        return any(polled is kind for _, polled in self._polls)

    def listen(self, address: str, kind: FetchResults) -> None:
        """Keep a poll open at this worker from now on; at an empty address there is none."""
        if address and (address, kind) not in self._polls:
            self._polls[address, kind] = asyncio.create_task(self._poll(address, kind))

    async def _poll(self, address: str, kind: FetchResults) -> None:
        request: Request[Any] = kind(self._session)
        try:
            while True:
                answer = await ask_worker(self._client, address, request)
                for pushed in answer.results:
                    key = pushed.key(self._session)
                    arrival = self._expected.get(key)
                    if arrival is None:
                        self._on_unexpected(key, pushed.result)
                    elif not arrival.done():
                        arrival.set_result(pushed.result)
        except OSError:
            return  # the worker has left; if it comes back, its next result opens another poll
        finally:
            del self._polls[address, kind]

    async def close(self) -> None:
        """End all polls."""
        polls = list(self._polls.values())
        for poll in polls:
            poll.cancel()
        if polls:
            await asyncio.wait(polls)
