"""Whether a trainer that answers gets on with its order: a deadlock between ranks leaves its event loop as it was.

A batch is watched by the passes of the model that the process counts. Other orders count none, but may wait for a
batch; from then on they are as long as they are: they may take many times the longest of their kind so far, and the
first of a kind is only told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from heddle_dask.engines.health import Tell

TIMES = 10.0
"""Many times the longest pause, or order, so far."""
TOLD_SHARE = 0.2
"""A pause is told after this share of its limit."""
WATCHED = "train"
"""The order whose parts are counted."""


class OrderWatch:
    """Watches the orders of one trainer, one process after another.

    Parameters
    ----------
    silence_s
        Least limit of a pause.
    """

    def __init__(self, silence_s: float, tell: Tell) -> None:
        self._silence_s = silence_s
        self._tell = tell
        self._longest_s: dict[str, float] = {}

    async def until_stuck(self, kind: str, parts: Callable[[], Awaitable[int | None]]) -> str:
        """Wait until nothing more has been done of an order for too long; returns that, in words that follow a name.

        Parameters
        ----------
        parts
            Asks the process for what it has counted; None: it did not answer, which others judge.
        """
        began_s = time.monotonic()
        seen: int | None = None
        told = False
        while True:
            known_s = self._longest_s.get(kind)
            limit_s = max(self._silence_s, TIMES * (known_s or 0.0))
            await asyncio.sleep(min(2.0, limit_s / 20))
            counted = await parts()
            now_s = time.monotonic()
            if counted is not None and counted != seen:
                if seen is not None and kind == WATCHED:
                    self.took(kind, now_s - began_s)
                seen, began_s, told = counted, now_s, False
                continue
            pause_s = now_s - began_s
            done = f"no progress with {kind}" + (f" after {seen} parts" if seen and kind == WATCHED else "")
            if pause_s >= limit_s and (kind == WATCHED or known_s is not None):
                return f"it made {done} for {pause_s:.0f} s"
            if pause_s >= limit_s * TOLD_SHARE and not told:
                told = True
                self._tell(f"the trainer has made {done} for {pause_s:.0f} s")

    def took(self, kind: str, seconds: float) -> None:
        """A part of an order has taken so long, or the whole where its parts are not counted."""
        self._longest_s[kind] = max(seconds, self._longest_s.get(kind, 0.0))
