"""What a panel shows of one snapshot, as plain data: computed once per snapshot, for all open tabs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from heddle_dask.views.history.run_snapshot import RunSnapshot

Columns = Mapping[str, Any]
"""Columns of equal length, by name: lists of texts, and arrays of numbers."""


@dataclass(frozen=True, slots=True)
class View:
    """What a panel shows of a snapshot."""

    heading: str  # HTML below the panel's title
    # The data of its charts, by name of the source.
    sources: Mapping[str, Columns] = field(default_factory=dict)
    empty: str = ""  # in place of the charts: why there is nothing to show; empty text if there is something
    rows: tuple[str, ...] = ()  # labels of the rows of its charts, top down, where they have rows
    html: str = ""  # HTML of the panel's table, where it has one


MakeView = Callable[[RunSnapshot], View]


class Views:
    """The views of the latest snapshot, made when a tab first asks for them.

    A source whose data is what it was before stays the same object, so that a tab sends only what has changed.
    """

    def __init__(self) -> None:
        self._snapshot: RunSnapshot | None = None
        self._current: dict[MakeView, View] = {}
        self._before: dict[MakeView, View] = {}

    def of(self, make: MakeView, snapshot: RunSnapshot) -> View:
        if snapshot is not self._snapshot:
            self._snapshot = snapshot
            self._before |= self._current
            self._current = {}
        if make not in self._current:
            self._current[make] = _keep_equal(make(snapshot), self._before.get(make))
        return self._current[make]


def _keep_equal(view: View, before: View | None) -> View:
    if before is None:
        return view
    kept = {
        name: old if (old := before.sources.get(name)) is not None and _equal(columns, old) else columns
        for name, columns in view.sources.items()
    }
    return replace(view, sources=kept)


def _equal(one: Columns, other: Columns) -> bool:
    if one.keys() != other.keys():
        return False
    return all(
        np.array_equal(one[name], other[name]) if isinstance(one[name], np.ndarray) else one[name] == other[name]
        for name in one
    )
