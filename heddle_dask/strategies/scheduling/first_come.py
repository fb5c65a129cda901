"""First come, first served, for steps."""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.nouns import Priority, StepRequest
from heddle_dask.core.view import ClusterView


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed:
    """Run steps in the order in which they were placed."""

    def priority(self, view: ClusterView, trajectory: Trajectory, step: StepRequest, order: int) -> Priority:
        """Each placement has its own level; earlier ones are higher."""
        return Priority(-order)
