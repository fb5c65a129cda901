"""An ordered list of engines with lookup by id in constant time; a cluster may have a thousand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heddle_dask.core.entities import Engine
from heddle_dask.core.ids import EngineId


class EngineList(list[Engine]):
    """A list of engines; it must not be changed after construction."""

    def __init__(self, engines: Iterable[Engine] = ()) -> None:
        super().__init__(engines)
        self.by_id: dict[EngineId, Engine] = {engine.spec.engine_id: engine for engine in self}


def engine_among(engines: Sequence[Engine], engine_id: EngineId | None) -> Engine | None:
    if engine_id is None:
        return None
    if isinstance(engines, EngineList):
        return engines.by_id.get(engine_id)
    return next((engine for engine in engines if engine.spec.engine_id == engine_id), None)
