"""Long payloads of actions: the driver keeps them, and sends each to the worker on which its action has started.

So they never pass through the scheduler, whose event loop every step needs. A worker that the driver cannot reach gets
them through the scheduler all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace

from distributed import Client

from heddle_dask.core.ids import ActionId
from heddle_dask.live.wire.messages import ActionCall
from heddle_dask.live.wire.transport import ask_worker, ask_worker_through_scheduler
from heddle_dask.live.wire.worker_messages import PutActionPayload

# Longer payloads are kept back. A graph of this size takes the scheduler a few milliseconds.
LONG_PAYLOAD_BYTES = 1 << 20


class LongPayloads:
    """One per driver; belongs to the client's event loop."""

    def __init__(self, client: Client, session: str) -> None:
        self._client = client
        self._session = session
        self._kept: dict[str, bytes] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._out_of_reach: set[str] = set()

    @contextlib.contextmanager
    def kept(self, call: ActionCall) -> Iterator[ActionCall]:
        """The call as it is submitted; a long payload is kept as long as the context is open."""
        if call.payload is None or len(call.payload) <= LONG_PAYLOAD_BYTES:
            yield call
            return
        self._kept[call.action_id] = call.payload
        try:
            yield replace(call, payload=None)
        finally:
            del self._kept[call.action_id]

    def send(self, action_id: str, address: str) -> None:
        """Send a payload that is kept to the worker at an address; one that is not wanted any more is not sent."""
        payload = self._kept.get(action_id)
        if payload is not None:
            request = PutActionPayload(self._session, ActionId(action_id), payload)
            sending = asyncio.create_task(self._send(address, request))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)

    async def _send(self, address: str, request: PutActionPayload) -> None:
        if address not in self._out_of_reach:
            try:
                await ask_worker(self._client, address, request)
                return
            except OSError:
                self._out_of_reach.add(address)
        # A worker that has died loses its actions, which run elsewhere; a scheduler that has died ends the run.
        with contextlib.suppress(OSError):
            await ask_worker_through_scheduler(self._client, address, request)

    async def close(self) -> None:
        sending = list(self._sending)
        for task in sending:
            task.cancel()
        if sending:
            await asyncio.wait(sending)
