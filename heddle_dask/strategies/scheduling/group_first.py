"""Order: groups that lack fewest members first, for trainers that take whole groups as they come."""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.nouns import StepRequest
from heddle_dask.core.priority import Priority
from heddle_dask.core.view import ClusterView
from heddle_dask.strategies.scheduling.longest_first import tokens_from_step_start


@dataclass(frozen=True, slots=True)
class GroupFirst:
    """By unfinished members of the group, then longest predicted first within equals.

    It shortens the wait for the next whole group and lengthens the last one's: wrong for a synchronous step.
    """

    def priority(self, view: ClusterView, trajectory: Trajectory, step: StepRequest, order: int) -> Priority:
        """A class per number of lacking members; within it the longest predicted first."""
        lacking = view.unfinished_by_group.get(trajectory.spec.group_id, 1)
        return Priority(-lacking, tokens_from_step_start(trajectory, "q90"))
