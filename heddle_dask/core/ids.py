"""Identifiers: plain strings at run time, distinct types for the type checker."""

from __future__ import annotations

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
