"""Admissions: who of those that were submitted may start; proposed by a strategy, each carried out once."""

from __future__ import annotations

from heddle_dask.core import guards
from heddle_dask.core.commands import AdmitTrajectory, Command
from heddle_dask.core.entities import Trajectory
from heddle_dask.core.state import State
from heddle_dask.core.transitions import TrajectoryEvent
from heddle_dask.core.view import Admission, ClusterView, RanksWaiting


class AdmissionDesk:
    """Those that wait to be admitted; the controller says when somebody may be."""

    def __init__(self, state: State, view: ClusterView, admission: Admission) -> None:
        self.state = state
        self.view = view
        self.admission = admission
        self._ranks = admission if isinstance(admission, RanksWaiting) else None

    def rank(self, trajectory: Trajectory) -> None:
        """It waits, and what is predicted of it is new: an admission that keeps a line sorts it in."""
        if self._ranks is not None:
            self._ranks.rank(trajectory)

    def admit(self, at: float) -> list[Command]:
        """Start whomever the strategy starts now."""
        if not self.state.unadmitted:
            return []
        commands: list[Command] = []
        chosen = self.admission.admit(self.view)
        self.state.freed.clear()
        for trajectory in chosen:
            guards.check_admission(trajectory)
            del self.state.unadmitted[trajectory.trajectory_id]
            trajectory.advance(TrajectoryEvent.ADMITTED, at)
            trajectory.admitted_at = at
            self.state.count_alive(trajectory)
            commands.append(AdmitTrajectory(trajectory.trajectory_id))
        return commands
