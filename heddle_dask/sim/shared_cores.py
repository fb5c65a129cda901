"""Engines of one machine whose cores are too few for them: how fast each is depends on how many of them work."""

from __future__ import annotations

from collections.abc import Mapping

from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.sim.engine import SimulatedEngine
from heddle_dask.sim.loop import VirtualTime


class SharedCores:
    """Prices its engines anew when one of them begins to work or has nothing more to do.

    Parameters
    ----------
    costs
        What each engine costs while so many are busy, as measured with so many at once. Numbers in between cost what
        the next smaller one does, and numbers below the least what that does. Empty: they do not share, every
        engine keeps its own cost.
    """

    def __init__(self, costs: Mapping[int, EngineCost], time: VirtualTime) -> None:
        self.engines: list[SimulatedEngine] = []
        self._costs = dict(sorted(costs.items()))
        self._time = time
        self._due = False
        self._current: EngineCost | None = None

    def cost_of(self, busy: int) -> EngineCost:
        """What an engine costs while `busy` of them are."""
        fitting = [count for count in self._costs if count <= busy]
        return self._costs[fitting[-1] if fitting else next(iter(self._costs))]

    def changed(self) -> None:
        """An engine began or ceased to be busy: look at all of them once, after whatever else happens just now."""
        if self._costs and not self._due:
            self._due = True
            self._time.after(0.0, self._reprice)

    def _reprice(self) -> None:
        self._due = False
        cost = self.cost_of(sum(engine.busy for engine in self.engines))
        if cost != self._current:
            self._current = cost
            for engine in self.engines:
                engine.reprice(cost)
