"""Failures counted by boundary and cause, with a bounded number of causes."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from heddle_dask.views.history.run_snapshot import FailureView

MOST_CAUSES: Final = 100
MOST_CHARS: Final = 120
OTHER: Final = "other"

# Ids, ports and counts differ from failure to failure: they are no part of a cause.
_VARYING: Final = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|\d+")


@lru_cache(maxsize=1024)
def cause_in_words(cause: str) -> str:
    """The first line of a cause with its numbers replaced by ``#``, at most `MOST_CHARS` long."""
    line = cause.strip().splitlines()[0] if cause.strip() else "unknown"
    words = _VARYING.sub("#", line)
    return words if len(words) <= MOST_CHARS else words[: MOST_CHARS - 1] + "…"


class FailureTally:
    """Counts failures; causes beyond the first `MOST_CAUSES` are counted as ``other`` of their boundary."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._latest_s: dict[tuple[str, str], float] = {}

    def count(self, boundary: str, cause: str, at: float) -> None:
        """Count one failure."""
        key = (boundary, cause_in_words(cause))
        if key not in self._counts and len(self._counts) >= MOST_CAUSES:
            key = (boundary, OTHER)
        self._counts[key] = self._counts.get(key, 0) + 1
        self._latest_s[key] = at

    def rows(self) -> tuple[FailureView, ...]:
        """The counts, largest first."""
        keys = sorted(self._counts, key=lambda key: (-self._counts[key], key))
        return tuple(FailureView(*key, self._counts[key], self._latest_s[key]) for key in keys)
