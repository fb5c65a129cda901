"""Admissions: which submitted trajectories start. A strategy proposes, and each proposal is carried out once."""

from __future__ import annotations

from heddle_dask.core import guards
from heddle_dask.core.commands import AdmitTrajectory, Command
from heddle_dask.core.entities import Trajectory
from heddle_dask.core.state import State
from heddle_dask.core.transitions import TrajectoryEvent
from heddle_dask.core.view import Admission, Admit, ClusterView, RanksWaiting


class Admissions:
    """Trajectories that wait for admission; the controller decides when to call the strategy."""

    def __init__(self, state: State, view: ClusterView, admission: Admission) -> None:
        self.state = state
        self.view = view
        self.admission = admission
        self._ranks = admission if isinstance(admission, RanksWaiting) else None

    def rank(self, trajectory: Trajectory) -> None:
        """Pass a waiting trajectory with a new prediction to an admission that keeps a queue."""
        if self._ranks is not None:
            self._ranks.rank(trajectory)

    def admit(self, at: float) -> list[Command]:
        """Start the trajectories that the strategy proposes now, each before its next proposal is requested."""
        if not self.state.unadmitted:
            return []
        commands: list[Command] = [self._start(proposal, at) for proposal in self.admission.admit(self.view)]
        self.state.freed.clear()
        return commands

    def enter(self, trajectory: Trajectory, at: float) -> None:
        """Count the trajectory as alive from now on."""
        trajectory.advance(TrajectoryEvent.ADMITTED, at)
        trajectory.admitted_at = at
        self.state.count_alive(trajectory)

    def _start(self, proposal: Admit, at: float) -> Command:
        trajectory = proposal.trajectory
        guards.check_admission(self.state, proposal)
        del self.state.unadmitted[trajectory.trajectory_id]
        self.enter(trajectory, at)
        if proposal.engine_id is not None:
            engine = self.state.engines[proposal.engine_id]
            self.state.reserve(trajectory, engine, proposal.reserved_tokens)
        return AdmitTrajectory(trajectory.trajectory_id, proposal.engine_id)
