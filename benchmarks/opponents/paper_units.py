"""Elastic CPUs as ARL-Tangram has them: units are shared among what starts, and an action keeps what it has got."""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.strategies.actions.elastic import ElasticUnits
from heddle_dask.strategies.actions.unit_choice import UnitChoice


@dataclass(slots=True)
class PaperUnits(ElasticUnits):
    """First come, first served per signature; CPUs too by the dynamic programming and the eviction of section 4.2."""

    def __post_init__(self) -> None:
        ElasticUnits.__post_init__(self)
        self._units = PaperChoice(self._durations, self._queues, int(self.depth), self.ahead, int(self.window))


@dataclass(slots=True)
class PaperChoice(UnitChoice):
    """Units of CPUs are chosen, for actions whose speed-up is declared."""

    def _chooses(self, elastic: str) -> bool:
        return True
