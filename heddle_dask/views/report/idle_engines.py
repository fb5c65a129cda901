"""Engines that had nothing to do while steps waited: what a late engine, or one that is avoided, costs."""

from __future__ import annotations


class IdleEngines:
    """A fold; each change takes O(1), whatever the number of engines."""

    def __init__(self) -> None:
        self._waiting = 0  # steps that wait for a slot
        self._queue_s = 0.0  # seconds in which there were any
        self._last_s = 0.0
        self._placed: dict[str, int] = {}  # steps of each engine that is there
        self._idle_since: dict[str, float] = {}  # `_queue_s` when it became idle
        self._idle_s: dict[str, float] = {}

    def seconds(self, engine_id: str) -> float:
        """Seconds in which the engine had no step, and a step waited for a slot."""
        now = self._queue_s - self._idle_since.get(engine_id, self._queue_s)
        return self._idle_s.get(engine_id, 0.0) + now

    def passed(self, at: float) -> None:
        """Time has come to `at`; what changes now is told after it."""
        if self._waiting:
            self._queue_s += at - self._last_s
        self._last_s = at

    def joined(self, engine_id: str) -> None:
        self._placed[engine_id] = 0
        self._idle_since[engine_id] = self._queue_s

    def lost(self, engine_id: str) -> None:
        self._end_idle(engine_id)
        self._placed.pop(engine_id, None)

    def requested(self) -> None:
        self._waiting += 1

    def placed(self, engine_id: str) -> None:
        if engine_id in self._placed:
            self._end_idle(engine_id)
            self._placed[engine_id] += 1

    def started(self) -> None:
        self._waiting -= 1

    def left(self, engine_id: str, waited: bool) -> None:
        """A step is not there any more; empty: it was at no engine."""
        self._waiting -= waited
        if engine_id in self._placed:
            self._placed[engine_id] -= 1
            if not self._placed[engine_id]:
                self._idle_since[engine_id] = self._queue_s

    def _end_idle(self, engine_id: str) -> None:
        self._idle_s[engine_id] = self.seconds(engine_id)
        self._idle_since.pop(engine_id, None)
