"""What a history keeps in bounded memory: its limits, failures by cause, a sample of lengths, and columns over time."""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar

from heddle_dask.views.history.run_snapshot import FailureView, LengthPair


@dataclass(frozen=True, slots=True)
class HistoryLimits:
    """What bounds the memory of a history: about 40 MB at 10,000 live trajectories by default.

    Attributes
    ----------
    segments
        Segments that are kept of each trajectory; the oldest go first.
    ended
        Ended trajectories that are kept; None: all of them.
    sample_interval_s
        Least seconds between two samples at first; it doubles when the series is full.
    """

    segments: int = 256
    ended: int | None = 500
    samples: int = 512
    sample_interval_s: float = 0.25
    lengths: int = 1000


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
        self._latest: dict[tuple[str, str], tuple[float, str]] = {}

    def count(self, boundary: str, cause: str, at: float, message: str = "") -> None:
        key = (boundary, cause_in_words(cause))
        if key not in self._counts and len(self._counts) >= MOST_CAUSES:
            key = (boundary, OTHER)
        self._counts[key] = self._counts.get(key, 0) + 1
        self._latest[key] = (at, message)

    def rows(self) -> tuple[FailureView, ...]:
        keys = sorted(self._counts, key=lambda key: (-self._counts[key], key))
        return tuple(FailureView(*key, self._counts[key], *self._latest[key]) for key in keys)


class LengthSample:
    """Reservoir sampling with a seed: equal events give the equal sample."""

    def __init__(self, most: int, seed: int = 0) -> None:
        self.seen = 0
        self._most = most
        self._random = random.Random(seed)
        self._pairs: list[LengthPair] = []

    def offer(self, pair: LengthPair) -> None:
        """Take the pair with the probability that makes every pair equally likely in the end."""
        self.seen += 1
        if len(self._pairs) < self._most:
            self._pairs.append(pair)
            return
        place = self._random.randrange(self.seen)
        if place < self._most:
            self._pairs[place] = pair

    def pairs(self) -> tuple[LengthPair, ...]:
        return tuple(self._pairs)


C = TypeVar("C", bound=Hashable)


class ThinnedSeries(Generic[C]):
    """Samples at least `interval_s` apart; the interval doubles whenever `most` samples are reached."""

    def __init__(self, most: int, interval_s: float) -> None:
        self.most = most
        self.interval_s = interval_s
        self.next_s = 0.0
        self.at_s = array("d")
        self.columns: dict[C, array[Any]] = {}

    def add_column(self, column: C, typecode: str = "d") -> None:
        self.columns[column] = array(typecode, (0,)) * len(self.at_s)

    def begin_sample(self, at: float) -> None:
        """Begin a sample at that time; the caller then appends one number to every column."""
        if len(self.at_s) >= self.most:
            self.at_s = self.at_s[::2]
            for column, values in self.columns.items():
                self.columns[column] = values[::2]
            self.interval_s *= 2
        self.at_s.append(at)
        self.next_s = at + self.interval_s
