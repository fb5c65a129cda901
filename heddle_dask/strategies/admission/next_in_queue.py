"""The waiting trajectory to start next on an engine: the longest that fits, or a sibling of its residents."""

from __future__ import annotations

from collections.abc import Callable

from heddle_dask.core.entities import Trajectory
from heddle_dask.strategies.admission.engine_snapshot import EngineSnapshot
from heddle_dask.strategies.admission.wait_queue import WaitQueue
from heddle_dask.strategies.remaining import RemainingDemand

DemandOf = Callable[[Trajectory], RemainingDemand]


def longest_or_sibling(
    queue: WaitQueue, engine: EngineSnapshot, critical: float, demand_of: DemandOf
) -> Trajectory | None:
    """The longest that the engine takes; if that is not critical, prefer one whose group prompt is cached there.

    O(log n) checks of the engine, and O(log n) for each group on the engine.

    Parameters
    ----------
    critical
        Length of path from which on a trajectory is critical: it would end last if it started late.
    """

    def takes(trajectory: Trajectory) -> bool:
        return engine.takes(trajectory, demand_of(trajectory))

    longest = queue.longest_where(takes)
    if longest is not None and queue.path_of(longest) >= critical:
        return longest
    sibling = queue.longest_of(engine.prompts, takes)
    return longest if sibling is None else sibling
