"""Which waiting trajectory starts next on an engine: the longest that fits, siblings of its residents first."""

from __future__ import annotations

from collections.abc import Callable

from heddle_dask.core.entities import Trajectory
from heddle_dask.strategies.admission.engine_snapshot import EngineSnapshot
from heddle_dask.strategies.admission.wait_queue import WaitQueue
from heddle_dask.strategies.remaining_demand import RemainingDemand

DemandOf = Callable[[Trajectory], RemainingDemand]


def longest_or_sibling(
    queue: WaitQueue, engine: EngineSnapshot, critical: float, demand_of: DemandOf
) -> Trajectory | None:
    """The longest that the engine takes; if that is not critical, rather one whose group's prompt is cached there.

    O(log n) looks at the engine, and as many for each group that is there.

    Parameters
    ----------
    critical
        A trajectory with a path as long would end last if it started late.
    """

    def takes(trajectory: Trajectory) -> bool:
        return engine.takes(trajectory, demand_of(trajectory))

    longest = queue.longest_where(takes)
    if longest is not None and queue.path_of(longest) >= critical:
        return longest
    sibling = queue.longest_of(engine.prompts, takes)
    return longest if sibling is None else sibling
