"""Trajectories that wait, by how long they are predicted to take."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.ids import GroupId, TrajectoryId
from heddle_dask.core.transitions import TrajectoryState
from heddle_dask.strategies.admission.engine_backlog import ask_of
from heddle_dask.strategies.admission.length_sums import LengthSums
from heddle_dask.strategies.remaining_demand import Stay

# Path, number, who, what of the path it generates, and its stay. No two numbers are alike: what follows them is not
# compared.
Entry = tuple[float, int, Trajectory, float, Stay]
NO_TIME = Stay(0.0, (0.0,))
Fits = Callable[[Trajectory], bool]


class WaitingLine:
    """Sorted by the path ahead, the shortest first; of equals the youngest first. Who is no more waiting is dropped.

    Attributes
    ----------
    tokens
        What all of them have left to generate.
    sums
        What they ask, by length.
    """

    def __init__(self) -> None:
        self.tokens = 0.0
        self.sums = LengthSums()
        self._line: list[Entry] = []
        self._entries: dict[TrajectoryId, Entry] = {}
        self._groups: dict[GroupId, list[Entry]] = {}

    def __len__(self) -> int:
        return len(self._line)

    def put(self, trajectory: Trajectory, left_tokens: float, path: float, stay: Stay = NO_TIME) -> None:
        """Line up, or change places. O(log n) and a move in memory.

        Parameters
        ----------
        path
            By which the line is sorted: `left_tokens`, and what its tools take (`stay`).
        """
        if trajectory.trajectory_id in self._entries:
            self.remove(trajectory)
        entry = (path, -trajectory.number, trajectory, left_tokens, stay)
        self._entries[trajectory.trajectory_id] = entry
        insort(self._line, entry)
        insort(self._groups.setdefault(trajectory.spec.group_id, []), entry)
        self.tokens += left_tokens
        self.sums.add(path, ask_of(stay))

    def remove(self, trajectory: Trajectory) -> None:
        """Leave the line."""
        entry = self._entries.pop(trajectory.trajectory_id)
        del self._line[bisect_left(self._line, entry)]
        group = self._groups[trajectory.spec.group_id]
        del group[bisect_left(group, entry)]
        if not group:
            del self._groups[trajectory.spec.group_id]
        self.tokens -= entry[3]
        self.sums.remove(entry[0], ask_of(entry[4]))

    def stay_of(self, trajectory: Trajectory) -> Stay:
        """As it was put into the line with."""
        return self._entries[trajectory.trajectory_id][4]

    def path_of(self, trajectory: Trajectory) -> float:
        """As it was put into the line with."""
        return self._entries[trajectory.trajectory_id][0]

    def longest(self) -> Trajectory | None:
        """The one with the longest path."""
        return self._last_waiting(self._line, len(self._line))

    def shortest(self) -> Trajectory | None:
        """The one with the shortest path, whether it still waits or not."""
        return self._line[0][2] if self._line else None

    def longest_where(self, fits: Fits) -> Trajectory | None:
        """The longest that fits.

        Found by bisection, as if whoever is shorter fits wherever a longer one does; where contexts differ much, a
        longer one that would fit may be passed over.
        """
        return self._longest_in(self._line, fits)

    def longest_of(self, groups: Iterable[GroupId], fits: Fits) -> Trajectory | None:
        """The longest of these groups that fits."""
        lines = [self._groups[group_id] for group_id in groups if group_id in self._groups]
        lines.sort(key=_last, reverse=True)
        best: Entry | None = None
        for line in lines:
            if best is not None and _last(line) < best:
                break  # from here on nobody is longer, fit or not
            found = self._longest_in(line, fits)
            if found is not None:
                best = max(best or self._entries[found.trajectory_id], self._entries[found.trajectory_id])
        return None if best is None else best[2]

    def _longest_in(self, line: list[Entry], fits: Fits) -> Trajectory | None:
        while line and line[0][2].state is not TrajectoryState.SUBMITTED:
            self.remove(line[0][2])  # it ended while it waited
        if not line or not fits(line[0][2]):
            return None  # on a full engine nobody fits, and one look is enough
        stop = bisect_left(line, True, lo=1, key=lambda entry: not fits(entry[2]))
        return self._last_waiting(line, stop)

    def _last_waiting(self, line: list[Entry], stop: int) -> Trajectory | None:
        while stop:
            trajectory = line[stop - 1][2]
            if trajectory.state is TrajectoryState.SUBMITTED:
                return trajectory
            self.remove(trajectory)  # it ended while it waited
            stop -= 1
        return None


def _last(line: list[Entry]) -> Entry:
    return line[-1]
