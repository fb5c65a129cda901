"""The paper's rank rule (Heddle, section 5.3): a new rank in the order of lengths names the engine.

The plan gave engine i the next s_i trajectories in order of length, n together. With n* still active, its share is
s_i · n*/n; the engine whose cumulative share holds the new rank is the target. Kept as printed for the preset
heddle-paper: when short groups empty, it pushes long trajectories onto engines that were planned for short ones.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from heddle_dask.core.ids import TrajectoryId


def rank_target(rank: int, active: int, sizes: Sequence[int]) -> int:
    """Number of the worker whose scaled range holds `rank`.

    The paper leaves rounding open: ranges are kept as exact fractions, rank r stands for the point r + 1/2, so that
    with n* = n every worker gets back exactly its s_i.

    Parameters
    ----------
    rank
        0 for the longest predicted of the active trajectories.
    active
        How many are active, more than `rank`.
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
    """The active trajectories in order of predicted length, longest first; equal ones by id.

    O(log n) comparisons and one short memory move per change: no sorting anew at each prediction.
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
        """Forget a trajectory that has ended; unknown ones are ignored."""
        length = self._length.pop(trajectory_id, None)
        if length is not None:
            del self._order[bisect_left(self._order, (-length, trajectory_id))]
