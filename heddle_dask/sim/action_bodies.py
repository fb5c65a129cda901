"""What carries out actions in virtual time: the seam between the world and its hosts, services and APIs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from heddle_dask.core.commands import RunAction
from heddle_dask.core.events import ActionFinished
from heddle_dask.core.ids import ActionId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest
from heddle_dask.sim.loop import VirtualTime
from heddle_dask.workloads.planned import PlannedAction


@dataclass(slots=True, eq=False)
class SimulatedCall:
    """One tool or reward call of a simulated program, from its request to its result.

    Attributes
    ----------
    work
        What it has to do, and how long that takes.
    asked_s, begun_s, back_s
        When its program asked, when it began on its host (for the last time, if hosts were lost), and when its program
        went on; negative: not yet.
    units
        Granted units of its elastic resource; CPUs, if it has none.
    run_s
        Seconds that its host reported.
    cause
        What ended it if it failed; empty: it did not.
    """

    request: ActionRequest
    work: PlannedAction
    asked_s: float
    begun_s: float = -1.0
    back_s: float = -1.0
    units: int = 0
    run_s: float = 0.0
    cause: str = ""

    @property
    def action_id(self) -> ActionId:
        """Name of the call."""
        return self.request.action_id

    @property
    def trajectory_id(self) -> TrajectoryId:
        """Its trajectory."""
        return self.request.trajectory_id


class ActionBody(Protocol):
    """Carries out the actions of one kind of host: CPUs, model services, APIs.

    Reports each end by the function that it was given, as `core.events.ActionFinished`; also of an aborted action, but
    not of one whose host is lost.
    """

    def run(self, command: RunAction, call: SimulatedCall) -> None:
        """Begin an action."""

    def abort(self, action_id: ActionId) -> None:
        """End a running action now; it reports what it ran."""

    def trajectory_ended(self, trajectory_id: TrajectoryId) -> None:
        """Drop what is kept for a trajectory."""


MakeActionBody = Callable[[VirtualTime, Callable[[ActionFinished, SimulatedCall], None]], ActionBody]
"""Makes one from the time and the function for the event of each action that has ended or was aborted."""
