"""Groups with the fewest missing members first, for trainers that consume whole groups as they complete."""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.nouns import Priority, StepRequest
from heddle_dask.core.view import ClusterView
from heddle_dask.strategies.scheduling.longest_first import tokens_from_step_start


@dataclass(frozen=True, slots=True)
class GroupFirst:
    """By the number of unfinished members of the group; ties: longest predicted first.

    The next group completes earlier, and the last one later: unsuitable for synchronous training.
    """

    def priority(self, view: ClusterView, trajectory: Trajectory, step: StepRequest, order: int) -> Priority:
        """A level per number of missing members; within it the longest predicted first."""
        lacking = view.unfinished_by_group.get(trajectory.spec.group_id, 1)
        return Priority(-lacking, tokens_from_step_start(trajectory, "q90"))
