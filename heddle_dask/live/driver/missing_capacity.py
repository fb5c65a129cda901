"""Notices that work waits for engines or tool workers which are gone, from the scheduler's counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class MissingCapacity:
    """Measures how long work has waited without any engine, or without any tool worker.

    Parameters
    ----------
    limit_s
        From then on, a wait is too long.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s: dict[str, float] = {}

    def too_long(self, counts: Mapping[str, Any], now_s: float) -> str:
        """One line that says what has been missing for too long; empty while nothing has.

        Parameters
        ----------
        counts
            `ClusterSnapshot.counts`; empty: the scheduler knows none.
        """
        if not counts:
            return ""
        steps = counts["queued"] + counts["not_admitted"]
        waiting = {
            "engine": 0 if counts["engines_ready"] else steps,
            "tool worker": 0 if counts["tool_cpus"] else counts["actions_waiting"],
        }
        for kind, waits in waiting.items():
            if not waits:
                self._since_s.pop(kind, None)
            elif now_s - self._since_s.setdefault(kind, now_s) >= self._limit_s:
                return f"the last {kind} is gone, and none has come back for {self._limit_s:g} s"
        return ""
