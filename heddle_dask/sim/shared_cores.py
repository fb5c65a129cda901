"""Engines that compete for the cores of one machine: the speed of each depends on the number of busy engines."""

from __future__ import annotations

from collections.abc import Mapping

from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.sim.engine import SimulatedEngine
from heddle_dask.sim.loop import VirtualTime


class SharedCores:
    """Updates the cost of all its engines when one of them becomes busy or idle.

    Parameters
    ----------
    costs
        Cost of each engine by number of busy engines, from measurements with that many at once. A number in between
        has the cost of the next smaller one, a number below the least the cost of the least. Empty: the engines do
        not compete, and each keeps its own cost.
    """

    def __init__(self, costs: Mapping[int, EngineCost], time: VirtualTime) -> None:
        self.engines: list[SimulatedEngine] = []
        self._costs = dict(sorted(costs.items()))
        self._time = time
        self._due = False
        self._current: EngineCost | None = None

    def cost_of(self, busy: int) -> EngineCost:
        """Cost of an engine while `busy` engines are busy."""
        fitting = [count for count in self._costs if count <= busy]
        return self._costs[fitting[-1] if fitting else next(iter(self._costs))]

    def changed(self) -> None:
        """An engine became busy or idle: update all costs once, after the other calls of this moment."""
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
