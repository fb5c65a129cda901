"""How long a trainer may take for an order: far longer than its orders of that kind have taken so far.

A process that is dead or stuck is replaced by its worker (`live.worker.trainer_host`), long before these limits: they
are for a worker that does not do so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from heddle_dask.core.errors import HeddleError

T = TypeVar("T")

LEAST_S, TIMES = 7200.0, 40.0
"""An order ends the training after so long, or so many times the longest of its kind so far, whichever is more."""
TOLD_SHARE = 0.05
"""It is told after this share of its limit. The first of a kind is only told: it may compile for long."""


class TrainerSilent(HeddleError):
    """The trainer has not answered an order within its limit; the message is one line."""


class TrainerPatience:
    """Waits for the answers of one trainer, and notes how long they take.

    Parameters
    ----------
    doing
        What the trainer does now, where that says more than the kind of its order; empty: it does not.
    least_s
        Least limit, where that is more than `LEAST_S`: a new process first trains what is in no checkpoint again.
    """

    def __init__(
        self, note: Callable[[str], None], doing: Callable[[], str] = lambda: "", least_s: float = 0.0
    ) -> None:
        self._note = note
        self._doing = doing
        self._least_s = least_s
        self._longest_s: dict[str, float] = {}

    async def of(self, kind: str, order: Awaitable[T]) -> T:
        """The answer to an order.

        Raises
        ------
        TrainerSilent
            The limit has passed; the training can be resumed.
        """
        began_s, longest_s = time.monotonic(), self._longest_s.get(kind)
        limit_s = max(LEAST_S, self._least_s, TIMES * (longest_s or 0.0))
        answer = asyncio.ensure_future(order)
        try:
            await asyncio.wait([answer], timeout=limit_s * TOLD_SHARE)
            if not answer.done():
                before = "the first of its kind" if longest_s is None else f"the longest before took {longest_s:.0f} s"
                asked = self._doing() or kind
                self._note(f"the trainer does not answer to {asked} for {limit_s * TOLD_SHARE:.0f} s; {before}")
                left_s = None if longest_s is None else limit_s * (1 - TOLD_SHARE)
                await asyncio.wait([answer], timeout=left_s)
            if not answer.done():
                asked = self._doing() or kind
                raise TrainerSilent(
                    f"the trainer has not answered to {asked} for {limit_s:.0f} s: look at it, then resume"
                )
            taken_s = time.monotonic() - began_s
            self._longest_s[kind] = max(taken_s, longest_s or 0.0)
            return answer.result()
        finally:
            answer.cancel()
