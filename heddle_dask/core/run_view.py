"""What the strategies of one run see: their own trajectories, and all engines with all that is on them."""

from __future__ import annotations

from collections.abc import Iterable

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import EngineId
from heddle_dask.core.run_record import RunRecord
from heddle_dask.core.state import State
from heddle_dask.core.view import ClusterView


class RunView(ClusterView):
    """The cluster as one run sees it. Loads of engines are of all runs, totals and what waits are its own."""

    __slots__ = ("_run",)

    def __init__(self, state: State, run: RunRecord) -> None:
        super().__init__(state)
        self._run = run

    @property
    def unadmitted(self) -> Iterable[Trajectory]:
        """Its trajectories that wait for admission, oldest first."""
        return (self._state.trajectories[i] for i in self._run.unadmitted)

    @property
    def waiting(self) -> int:
        """Number of its trajectories that wait for admission."""
        return len(self._run.unadmitted)

    @property
    def freed(self) -> Iterable[EngineId]:
        """Engines with less load since the last call of its admission."""
        return self._run.freed

    @property
    def sampled_tokens(self) -> int:
        """Tokens generated so far by its trajectories."""
        return self._run.sampled_tokens

    @property
    def observed_tokens(self) -> int:
        """Tokens added between its steps so far by tools and templates."""
        return self._run.observed_tokens

    @property
    def observed_per_token(self) -> float | None:
        """Observation tokens per generated token, from its predictor; None when unknown."""
        return self._run.observed_per_token

    @property
    def expected_tokens(self) -> int:
        """Sum of `Trajectory.expected_tokens` over its live trajectories."""
        return self._run.expected_tokens

    @property
    def alive(self) -> int:
        """Its admitted trajectories that have not ended."""
        return self._run.alive

    def is_own(self, trajectory: Trajectory) -> bool:
        """Whether the trajectory is of this run."""
        return trajectory.spec.run_id == self._run.description.run_id

    def queued(self, engine: Engine) -> int:
        """Steps that run on this engine or precede a further one: those of other runs that are held back do not."""
        if not engine.held:
            return len(engine.inflight)
        return len(engine.inflight) - engine.held + engine.held_of.get(self._run.description.run_id, 0)

    @property
    def reservations(self) -> int:
        """Number of its trajectories with a reservation on an engine."""
        return self._run.reservations
