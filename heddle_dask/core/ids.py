"""Identifiers, plain strings at run time, and the version of the model that is being trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NewType

TrajectoryId = NewType("TrajectoryId", str)
GroupId = NewType("GroupId", str)
EngineId = NewType("EngineId", str)
ActionId = NewType("ActionId", str)
HostId = NewType("HostId", str)
RunId = NewType("RunId", str)

FIRST_RUN = RunId("1")
"""The run with which a controller begins; those that join it are numbered from 2."""


class StepId(NamedTuple):
    """Identity of one attempt at one LLM step of a trajectory, carried by every message about the step.

    Attributes
    ----------
    step_index
        Position in the trajectory, from 0.
    attempt
        0 at first. Incremented each time the driver requests the same step again: its engine or its result was lost,
        its context was missing on the worker, the program cancelled it, or it was preempted and continues from the
        tokens it has.
    """

    trajectory_id: TrajectoryId
    step_index: int
    attempt: int


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """Weights after `number` optimiser steps of one line of training.

    Attributes
    ----------
    lineage
        Name of the line of training. A run that is resumed from an older checkpoint begins a new one, so that two
        different models never have the same version; empty: the weights that an engine was started with.
    number
        Finished optimiser steps; 0 for the weights with which the training began.
    """

    lineage: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.lineage}:{self.number}" if self.lineage else str(self.number)

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Read what `str` makes."""
        lineage, _, number = text.rpartition(":")
        return cls(lineage, int(number))

    def is_newer_than(self, other: PolicyVersion) -> bool:
        """Whether these weights replace `other` on an engine: another lineage, or a later step of the same one."""
        return self.lineage != other.lineage or self.number > other.number
