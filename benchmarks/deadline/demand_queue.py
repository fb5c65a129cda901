"""Waiting trajectories with their demands, also summed by length for makespan estimates over thousands of them."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.deadline.engine_backlog import backlog_item
from benchmarks.deadline.length_sums import LengthSums
from heddle_dask.core.entities import Trajectory
from heddle_dask.core.ids import TrajectoryId
from heddle_dask.strategies.admission.wait_queue import WaitQueue
from heddle_dask.strategies.remaining import RemainingDemand


class DemandQueue(WaitQueue):
    """A wait queue with the demand of each trajectory, as of its insertion.

    Attributes
    ----------
    classes
        The demands, summed by length.
    """

    def __init__(self) -> None:
        super().__init__()
        self.classes = LengthSums()
        self._demands: dict[TrajectoryId, RemainingDemand] = {}

    def put_demand(self, trajectory: Trajectory, left_tokens: float, path: float, demand: RemainingDemand) -> None:
        """Add a trajectory with its demand, or change both."""
        self.put(trajectory, left_tokens, path)
        self._demands[trajectory.trajectory_id] = demand
        self.classes.add(path, backlog_item(demand))

    def refresh(self, demand_of: Callable[[Trajectory], RemainingDemand]) -> None:
        """Take every demand again; places in the queue stay."""
        for path, _, trajectory, _, _ in self._sorted:
            name = trajectory.trajectory_id
            self.classes.remove(path, backlog_item(self._demands[name]))
            self._demands[name] = demand_of(trajectory)
            self.classes.add(path, backlog_item(self._demands[name]))

    def remove(self, trajectory: Trajectory) -> None:
        """Remove a trajectory from the queue."""
        path = self.path_of(trajectory)
        super().remove(trajectory)
        self.classes.remove(path, backlog_item(self._demands.pop(trajectory.trajectory_id)))

    def demand_of(self, trajectory: Trajectory) -> RemainingDemand:
        """Demand of a trajectory as of its insertion."""
        return self._demands[trajectory.trajectory_id]
