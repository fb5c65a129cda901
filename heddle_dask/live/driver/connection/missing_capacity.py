"""Notices that work waits for engines or tool workers which are gone, from the scheduler's counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class MissingCapacity:
    """Measures how long work has waited without any engine, or without any tool worker.

    Time in which a job that will bring one waits in a queue is not counted: it may be hours, and the work is not lost.

    Parameters
    ----------
    limit_s
        From then on, a wait is too long.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._waited_s: dict[str, float] = {}
        self._seen_s = 0.0

    def too_long(self, counts: Mapping[str, Any], now_s: float) -> str:
        """One line that says what has been missing for too long; empty while nothing has.

        Parameters
        ----------
        counts
            `ClusterSnapshot.counts`, and what is queued; empty: the scheduler knows none.
        """
        if not counts:
            return ""
        since_s, self._seen_s = now_s - self._seen_s, now_s
        steps = counts["queued"] + counts["not_admitted"]
        waiting = {
            "engine": 0 if counts["engines_ready"] else steps,
            "tool worker": 0 if counts["tool_cpus"] else counts["actions_waiting"],
        }
        queued = {
            "engine": counts.get("engines_queued", 0),
            "tool worker": counts.get("tool_workers_queued", 0),
        }
        for kind, waits in waiting.items():
            if not waits:
                self._waited_s.pop(kind, None)
                continue
            before_s = self._waited_s.get(kind)
            counted_s = 0.0 if before_s is None or queued[kind] else since_s
            self._waited_s[kind] = (before_s or 0.0) + counted_s
            if self._waited_s[kind] >= self._limit_s:
                return f"the last {kind} is gone, and none has come back for {self._limit_s:g} s"
        return ""
