"""Columns of numbers over time, in bounded memory: when full, every second sample is dropped."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class ThinnedSeries(Generic[C]):
    """Samples at least `interval_s` apart; the interval doubles whenever `most` samples are reached.

    Attributes
    ----------
    at_s
        Times of the samples.
    next_s
        The earliest time of the next sample.
    """

    def __init__(self, most: int, interval_s: float) -> None:
        self.most = most
        self.interval_s = interval_s
        self.next_s = 0.0
        self.at_s = array("d")
        self.columns: dict[C, array[Any]] = {}

    def add_column(self, column: C, typecode: str = "d") -> None:
        """Add a column, with zeros at the times before."""
        self.columns[column] = array(typecode, (0,)) * len(self.at_s)

    def drop_column(self, column: C) -> None:
        """Forget a column."""
        self.columns.pop(column, None)

    def begin_sample(self, at: float) -> None:
        """Begin a sample at that time; the caller then appends one number to every column."""
        if len(self.at_s) >= self.most:
            self.at_s = self.at_s[::2]
            for column, values in self.columns.items():
                self.columns[column] = values[::2]
            self.interval_s *= 2
        self.at_s.append(at)
        self.next_s = at + self.interval_s
