"""The paper's rank rule (Heddle, section 5.3): the rank of a trajectory by length determines its engine.

The plan assigned to engine i the next s_i trajectories in order of length, n in total. With n* still active, its
share is s_i · n*/n; the target is the engine with the rank in its cumulative share. Implemented as printed, for the
preset heddle-paper: when short groups have ended, it moves long trajectories to engines that were planned for short
ones.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from heddle_dask.core.ids import TrajectoryId


def rank_target(rank: int, active: int, sizes: Sequence[int]) -> int:
    """Number of the worker with `rank` in its scaled range.

    The paper does not specify rounding. Here ranges are exact fractions and rank r is the point r + 1/2, so with n* =
    n every worker gets exactly its s_i.

    Parameters
    ----------
    rank
        0 for the longest predicted of the active trajectories.
    active
        Number of active trajectories; more than `rank`.
    sizes
        s_i of the plan, in the order of the runs; their sum is n, at least 1.
    """
    if not 0 <= rank < active:
        raise ValueError(f"rank {rank} of {active} active trajectories")
    planned = sum(sizes)
    passed = 0
    for number, size in enumerate(sizes):
        passed += size
        # rank + 1/2 < passed · active / planned, in whole numbers
        if (2 * rank + 1) * planned < 2 * passed * active:
            return number
    raise ValueError("the plan holds no trajectory")


class RankOrder:
    """The active trajectories in order of predicted length, longest first; ties by id.

    O(log n) comparisons and one short move of memory per change.
    """

    def __init__(self) -> None:
        self._order: list[tuple[float, TrajectoryId]] = []
        self._length: dict[TrajectoryId, float] = {}

    def __len__(self) -> int:
        return len(self._order)

    def update(self, trajectory_id: TrajectoryId, length: float) -> int:
        """Set the predicted length and return the new rank, 0 for the longest."""
        self.remove(trajectory_id)
        self._length[trajectory_id] = length
        entry = (-length, trajectory_id)
        insort(self._order, entry)
        return bisect_left(self._order, entry)

    def remove(self, trajectory_id: TrajectoryId) -> None:
        """Remove an ended trajectory; an unknown one is ignored."""
        length = self._length.pop(trajectory_id, None)
        if length is not None:
            del self._order[bisect_left(self._order, (-length, trajectory_id))]
