"""Engines in order, found by id at once: a thousand are too many to walk over at every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heddle_dask.core.entities import Engine
from heddle_dask.core.ids import EngineId


class EngineList(list[Engine]):
    """A list that is not changed once it is made.

    Attributes
    ----------
    by_id
        Its engines.
    """

    def __init__(self, engines: Iterable[Engine] = ()) -> None:
        super().__init__(engines)
        self.by_id: dict[EngineId, Engine] = {engine.spec.engine_id: engine for engine in self}


def engine_among(engines: Sequence[Engine], engine_id: EngineId | None) -> Engine | None:
    """The one of that id, if it is there."""
    if engine_id is None:
        return None
    if isinstance(engines, EngineList):
        return engines.by_id.get(engine_id)
    return next((engine for engine in engines if engine.spec.engine_id == engine_id), None)
