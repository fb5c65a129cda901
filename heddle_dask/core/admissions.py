"""Admissions: which submitted trajectories start. A strategy proposes, and each proposal is carried out once.

Where several runs share the engines, they are asked in the order of their turns (`core.fair_share`). A run that holds
more than its share of the KV memory admits nothing while another one that holds less waits; unless that one has
declined although an engine is half empty, for then it has no use for the memory now.
"""

from __future__ import annotations

from heddle_dask.core import guards
from heddle_dask.core.commands import AdmitTrajectory, Command
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.run_record import RunRecord
from heddle_dask.core.run_strategies import RunStrategies, StrategyTable
from heddle_dask.core.state import State
from heddle_dask.core.transitions import TrajectoryEvent
from heddle_dask.core.view import Admit

# An engine with less than this share of its KV memory in use has room for any trajectory that is worth waiting for.
_HALF_EMPTY = 0.5


class Admissions:
    """Trajectories that wait for admission; the controller decides when to call the strategies."""

    def __init__(self, state: State, runs: StrategyTable) -> None:
        self.state = state
        self.runs = runs

    def admit(self, at: float) -> list[Command]:
        """Start the trajectories that the strategies propose now, each before the next proposal is requested."""
        if not self.state.unadmitted:
            return []
        for run in self.state.runs.values():
            run.freed.update(self.state.freed)
        self.state.freed.clear()
        if self.state.is_shared:
            return self._admit_in_turn(at)
        return [command for run in self.runs for command in self._ask(run, at)]

    def _ask(self, run: RunStrategies, at: float) -> list[Command]:
        """Start what the admission of one run proposes."""
        record = self.state.runs[run.run_id]
        if not record.unadmitted:
            return []
        proposals = run.strategies.admission.admit(run.view)
        # A strategy may still keep one in its queue that was cancelled meanwhile.
        commands: list[Command] = [
            self._start(each, at) for each in proposals if not each.trajectory.cancelled
        ]
        record.freed.clear()
        return commands

    def _admit_in_turn(self, at: float) -> list[Command]:
        """Ask the runs that hold less than their share first, and the others unless one of those still waits."""
        capacity = sum(engine.spec.kv_capacity_tokens for engine in self.state.ready_engines)
        in_turn = self.runs.in_turn()
        below = [run for run in in_turn if not self._is_over(self.state.runs[run.run_id], capacity)]
        commands = [command for run in below for command in self._ask(run, at)]
        waits = any(self.state.runs[run.run_id].unadmitted for run in below)
        if waits and not any(self._is_half_empty(engine) for engine in self.state.ready_engines):
            return commands
        others = [run for run in in_turn if run not in below]
        return [*commands, *(command for run in others for command in self._ask(run, at))]

    def _is_over(self, run: RunRecord, capacity_tokens: int) -> bool:
        """Whether a run holds its share of the KV memory or more; False where no engine says how much it has."""
        wanting = [r for r in self.state.runs.values() if r.alive or r.unadmitted]
        weights = sum(r.description.weight for r in wanting)
        return 0 < capacity_tokens * run.description.weight <= run.kv_tokens * weights

    @staticmethod
    def _is_half_empty(engine: Engine) -> bool:
        used = engine.resident_tokens + engine.reserved_tokens
        has_slot = len(engine.inflight) + len(engine.reserved) < engine.spec.slots
        return has_slot and used < _HALF_EMPTY * engine.spec.kv_capacity_tokens

    def enter(self, trajectory: Trajectory, at: float) -> None:
        """Count the trajectory as alive from now on."""
        trajectory.advance(TrajectoryEvent.ADMITTED, at)
        trajectory.admitted_at = at
        self.state.count_alive(trajectory)

    def _start(self, proposal: Admit, at: float) -> Command:
        trajectory = proposal.trajectory
        guards.check_admission(self.state, proposal)
        self.state.stop_waiting_for_admission(trajectory)
        self.enter(trajectory, at)
        if proposal.engine_id is not None:
            engine = self.state.engines[proposal.engine_id]
            self.state.reserve(trajectory, engine, proposal.reserved_tokens)
        return AdmitTrajectory(trajectory.trajectory_id, proposal.engine_id)
