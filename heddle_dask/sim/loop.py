"""Virtual time: an event loop of scheduled calls; calls for the same time run in the order of their scheduling.

Two of three calls are scheduled for the current time. They bypass the heap: its entries for the current time were
scheduled earlier and run first.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Any


class VirtualTime:
    """The current virtual time and the scheduled calls.

    Attributes
    ----------
    now_s
        Seconds since the beginning; never goes back.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._due: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._number = 0

    def at(self, time_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call at `time_s`, or now if that has passed."""
        if time_s <= self.now_s:
            self._due.append((call, arguments))
            return
        self._number += 1
        heapq.heappush(self._heap, (time_s, self._number, call, arguments))

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now_s + delay_s, call, *arguments)

    def run(self, until_s: float = math.inf) -> None:
        """Run all calls up to `until_s`, including those that they schedule."""
        heap, due = self._heap, self._due
        while heap or due:
            at_s = self.now_s if due else heap[0][0]
            if at_s > until_s:
                return
            self.calls += 1
            if heap and heap[0][0] <= at_s:
                self.now_s, _, call, arguments = heapq.heappop(heap)
            else:
                call, arguments = due.popleft()
            call(*arguments)
