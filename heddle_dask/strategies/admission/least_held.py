"""Engines in the order in which an admission asks them: least used first; the first to join breaks ties."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from heddle_dask.core.entities import Engine
from heddle_dask.core.ids import EngineId

Entry = tuple[float, int, Engine]


class LeastHeld:
    """A heap with entries that may be changed and dropped; outdated entries are skipped at the top.

    Changes are O(log n) amortised: outdated entries are removed once they are most of the heap.
    """

    def __init__(self, held: Iterable[tuple[Engine, float]] = ()) -> None:
        self._entries: dict[EngineId, Entry] = {e.engine_id: (share, e.number, e) for e, share in held}
        self._heap = list(self._entries.values())
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, engine_id: EngineId) -> bool:
        return engine_id in self._entries

    def put(self, engine: Engine, share: float) -> None:
        entry = (share, engine.number, engine)
        if self._entries.get(engine.engine_id) == entry:
            return
        self._entries[engine.engine_id] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 8:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def drop(self, engine_id: EngineId) -> None:
        del self._entries[engine_id]

    def least(self) -> Engine | None:
        """The least used engine; None without one."""
        while self._heap:
            entry = self._heap[0]
            engine = entry[2]
            if self._entries.get(engine.engine_id) == entry:
                return engine
            heapq.heappop(self._heap)
        return None
