"""The trajectory with the least service so far first (Autellix, 2502.13965: program-level least attained service)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.nouns import Priority, StepRequest
from heddle_dask.core.view import ClusterView


@dataclass(frozen=True, slots=True)
class LeastAttained:
    """Multi-level queues by the tokens that a trajectory has generated, parts of a preempted step included.

    The queue of a step is chosen when it is placed, as Autellix counts the finished calls of a program. Autellix also
    lifts programs that have waited long for little service to the first queue; this does not.

    Parameters
    ----------
    quantum_tokens
        Service of the first level; each further level is twice as wide. Within a level: first come, first served.
    """

    quantum_tokens: int = 512

    def __post_init__(self) -> None:
        if self.quantum_tokens < 1:
            raise ValueError(f"quantum_tokens={self.quantum_tokens}: use a number of at least 1")

    def priority(self, view: ClusterView, trajectory: Trajectory, step: StepRequest, order: int) -> Priority:
        """Minus the number of the queue, from 0 for the least service."""
        return Priority(-math.floor(math.log2(1 + trajectory.generated_tokens / self.quantum_tokens)))
