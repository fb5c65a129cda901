"""Waiting trajectories, sorted by predicted remaining path."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.ids import GroupId, TrajectoryId
from heddle_dask.core.transitions import TrajectoryState

# Path, number, trajectory, tokens of the path, what its prediction was learnt from. Numbers are distinct, so the items
# after them are never compared.
Entry = tuple[float, int, Trajectory, float, float]
Fits = Callable[[Trajectory], bool]


class WaitQueue:
    """Sorted by remaining path, shortest first; ties: the latest first. Ended trajectories are dropped.

    Attributes
    ----------
    tokens
        Remaining tokens of all waiting trajectories.
    """

    def __init__(self) -> None:
        self.tokens = 0.0
        self._sorted: list[Entry] = []
        self._entries: dict[TrajectoryId, Entry] = {}
        self._groups: dict[GroupId, list[Entry]] = {}
        self._learnt_from: Counter[float] = Counter()

    def __len__(self) -> int:
        return len(self._sorted)

    @property
    def trajectories(self) -> list[Trajectory]:
        """All of them, shortest first."""
        return [entry[2] for entry in self._sorted]

    @property
    def learnt_from(self) -> float:
        """Least `Prediction.learnt_from` of all entries; infinite where every one is an oracle's, or there is none.

        Predictors answer from few different models, so that this is O(1).
        """
        return min(self._learnt_from, default=math.inf)

    def put(self, trajectory: Trajectory, left_tokens: float, path: float) -> None:
        """Add a trajectory, or change its place. O(log n) comparisons and one move of memory.

        Parameters
        ----------
        path
            Sort key: `left_tokens`, and tokens that take as long as its tools (`remaining_demand`).
        """
        self.discard(trajectory)
        said = trajectory.prediction
        learnt_from = math.inf if said is None or said.learnt_from is None else said.learnt_from
        entry = (path, -trajectory.number, trajectory, left_tokens, learnt_from)
        self._learnt_from[learnt_from] += 1
        self._entries[trajectory.trajectory_id] = entry
        insort(self._sorted, entry)
        insort(self._groups.setdefault(trajectory.spec.group_id, []), entry)
        self.tokens += left_tokens

    def remove(self, trajectory: Trajectory) -> None:
        entry = self._entries.pop(trajectory.trajectory_id)
        del self._sorted[bisect_left(self._sorted, entry)]
        group = self._groups[trajectory.spec.group_id]
        del group[bisect_left(group, entry)]
        if not group:
            del self._groups[trajectory.spec.group_id]
        self.tokens -= entry[3]
        self._learnt_from[entry[4]] -= 1
        if not self._learnt_from[entry[4]]:
            del self._learnt_from[entry[4]]

    def discard(self, trajectory: Trajectory) -> None:
        if trajectory.trajectory_id in self._entries:
            self.remove(trajectory)

    def path_of(self, trajectory: Trajectory) -> float:
        """The path of a trajectory as of its insertion."""
        return self._entries[trajectory.trajectory_id][0]

    def longest(self) -> Trajectory | None:
        """The trajectory with the longest path."""
        return self._last_waiting(self._sorted, len(self._sorted))

    def shortest(self) -> Trajectory | None:
        """The trajectory with the shortest path, even if it no longer waits."""
        return self._sorted[0][2] if self._sorted else None

    def longest_where(self, fits: Fits) -> Trajectory | None:
        """The longest that fits.

        Found by bisection, which assumes that a shorter trajectory fits wherever a longer one does. If contexts differ
        much, a longer one that fits may be missed.
        """
        return self._longest_in(self._sorted, fits)

    def longest_of(self, groups: Iterable[GroupId], fits: Fits) -> Trajectory | None:
        """The longest of these groups that fits."""
        members = [self._groups[group_id] for group_id in groups if group_id in self._groups]
        members.sort(key=_last, reverse=True)
        best: Entry | None = None
        for entries in members:
            if best is not None and _last(entries) < best:
                break  # the remaining groups have no longer trajectory
            found = self._longest_in(entries, fits)
            if found is not None:
                best = max(best or self._entries[found.trajectory_id], self._entries[found.trajectory_id])
        return None if best is None else best[2]

    def _longest_in(self, entries: list[Entry], fits: Fits) -> Trajectory | None:
        while entries and entries[0][2].state is not TrajectoryState.SUBMITTED:
            self.remove(entries[0][2])  # it ended while it waited
        if not entries or not fits(entries[0][2]):
            return None  # a full engine: not even the shortest fits, found with one check
        stop = bisect_left(entries, True, lo=1, key=lambda entry: not fits(entry[2]))
        return self._last_waiting(entries, stop)

    def _last_waiting(self, entries: list[Entry], stop: int) -> Trajectory | None:
        while stop:
            trajectory = entries[stop - 1][2]
            if trajectory.state is TrajectoryState.SUBMITTED:
                return trajectory
            self.remove(trajectory)  # it ended while it waited
            stop -= 1
        return None


def _last(entries: list[Entry]) -> Entry:
    return entries[-1]
