"""Whether an engine with steps in flight still works: its counters move, or it answers a one-token request."""

from __future__ import annotations

import asyncio
import time

from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import EngineRefused, EngineUnreachable

# The counters are read this often per limit: a stall is noticed at most a quarter late.
_POLLS_PER_STALL = 4


class ProgressWatch:
    """Watches one engine.

    Counters that stand still are no proof: an engine may not count what it does. A one-token request (a canary) is: a
    working engine answers it within an iteration, unless longer steps take all slots, and then its counters move. So an
    engine is stuck when no step has ended and no counter has moved for `stall_s`, and then neither the canary is
    answered nor a counter moves for `canary_s`. An engine that loads weights is not stuck: that has a limit of its own.
    """

    def __init__(self, client: EngineClient, *, stall_s: float, canary_s: float) -> None:
        self._client = client
        self._stall_s = stall_s
        self._canary_s = canary_s
        self._seen: tuple[int, tuple[float, ...]] = (0, ())

    async def until_stuck(self) -> str:
        """Wait until the engine is stuck; returns how that was found, in one line."""
        still_since_s = time.monotonic()
        while True:
            await asyncio.sleep(self._stall_s / _POLLS_PER_STALL)
            idle = not self._client.steps_in_flight or self._client.is_updating
            if idle or await self._moved():
                still_since_s = time.monotonic()
            elif time.monotonic() - still_since_s >= self._stall_s:
                cause = await self._canary_failure()
                if cause and not await self._moved():
                    return (
                        f"it made no progress for {self._stall_s:g} s with "
                        f"{self._client.steps_in_flight} steps in flight, and a one-token request failed: {cause}"
                    )
                still_since_s = time.monotonic()

    async def _moved(self) -> bool:
        """Whether a step has ended, or a counter has moved, since the call before."""
        ended, counters = self._seen
        if self._client.steps_ended == ended:
            try:
                counters = await self._client.progress()
            except (EngineUnreachable, EngineRefused):
                return False
        before, self._seen = self._seen, (self._client.steps_ended, counters)
        return self._seen != before

    async def _canary_failure(self) -> str:
        """Why a one-token request failed; empty when it was answered."""
        try:
            async with asyncio.timeout(self._canary_s):
                await self._client.canary()
        except TimeoutError:
            return f"no answer within {self._canary_s:g} s"
        except EngineUnreachable as error:
            return str(error)
        except EngineRefused:
            return ""  # an answer
        return ""
