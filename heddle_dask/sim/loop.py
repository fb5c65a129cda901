"""Virtual time: what is to happen, by when; ties in the order in which they were asked for."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any


class VirtualTime:
    """A heap of calls to come and the time that it is.

    Attributes
    ----------
    now_s
        Seconds since the beginning; never goes back.
    calls
        Calls made so far.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def at(self, time_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Make the call at that time, or now if that has passed."""
        self._number += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._number, call, arguments))

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Make the call so many seconds from now."""
        self.at(self.now_s + delay_s, call, *arguments)

    def run(self, until_s: float = math.inf) -> None:
        """Make every call that is due until then, those that they ask for included."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, call, arguments = heapq.heappop(self._heap)
            self.calls += 1
            call(*arguments)
