"""When actions may start again, and how long they take.

Repetitions of calls that an API refused or failed may not start before a time. The mean seconds of a tool are the
expected time of a running call.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from heddle_dask.core.ids import ActionId


class ToolSeconds:
    """Seconds of finished actions, by label. Grows with the number of labels, not of actions."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._total_s: dict[str, float] = {}

    def took(self, label: str, seconds: float) -> None:
        self._count[label] = self._count.get(label, 0) + 1
        self._total_s[label] = self._total_s.get(label, 0.0) + seconds

    def mean_s(self, labels: Iterable[str]) -> float | None:
        """The largest mean over these labels, for concurrent calls; None if no such action has ended yet."""
        known = [self._total_s[label] / self._count[label] for label in labels if label in self._count]
        return max(known, default=None)


class DelayedActions:
    """A heap of actions by the time of their start; iterates over them in no particular order."""

    def __init__(self) -> None:
        self._until_s: dict[ActionId, float] = {}
        self._heap: list[tuple[float, int, ActionId]] = []

    def __len__(self) -> int:
        return len(self._until_s)

    def __iter__(self) -> Iterator[ActionId]:
        return iter(self._until_s)

    def add(self, action_id: ActionId, until_s: float, number: int) -> None:
        """Hold the action back until then; `number` breaks ties, smaller first."""
        self._until_s[action_id] = until_s
        heapq.heappush(self._heap, (until_s, number, action_id))

    def discard(self, action_id: ActionId) -> None:
        self._until_s.pop(action_id, None)

    @property
    def next_s(self) -> float | None:
        """The earliest time at which one may start; None without one."""
        while self._heap and self._until_s.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, at: float) -> list[ActionId]:
        """The actions that may start now, the earliest first; they are not held back any more."""
        due: list[ActionId] = []
        while (next_s := self.next_s) is not None and next_s <= at:
            action_id = heapq.heappop(self._heap)[2]
            del self._until_s[action_id]
            due.append(action_id)
        return due
