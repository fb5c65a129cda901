"""Costs of engines of several classes of hardware."""

from __future__ import annotations

from collections.abc import Mapping

from heddle_dask.cost.iteration import EngineCost


class ClassCosts(dict[int, EngineCost]):
    """Costs by TP degree, as one class of hardware has them, and those of every class beside them.

    Parameters
    ----------
    by_class
        Costs by class of hardware and TP degree. As a mapping by degree alone, this is that of the first class with the
        degree.
    """

    def __init__(self, by_class: Mapping[tuple[str, int], EngineCost]) -> None:
        super().__init__()
        self.by_class = dict(by_class)
        for (_, degree), cost in by_class.items():
            self.setdefault(degree, cost)

    def of(self, hardware: str, tp_degree: int) -> EngineCost | None:
        """The cost of an engine of that class and degree; None: unknown."""
        return self.by_class.get((hardware, tp_degree))
