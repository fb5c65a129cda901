"""Admissions: which submitted trajectories start, and the bound on staleness that each run sets.

A strategy proposes, and each proposal is carried out once. Where several runs share the engines, they are asked in the
order of their turns (`core.fair_share`). A run that holds more than its share of the KV memory admits nothing while
another one that holds less waits; unless that one has declined although an engine is half empty, for then it has no use
for the memory now.

A trajectory waits for a credit (`core.run_record`) before the admission of its run sees it. Its first step goes to an
engine whose weights are new enough, or waits for one. In the mode ``"cancel"`` what is too old is cancelled at the next
optimiser step, turn or installation of weights, and the other members of its group with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from heddle_dask.core import events as ev
from heddle_dask.core import guards
from heddle_dask.core.commands import AdmitTrajectory, CancelTrajectory, Command
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.core.run_description import REDUNDANT, STALE
from heddle_dask.core.run_record import RunRecord
from heddle_dask.core.run_strategies import RunStrategies, StrategyTable
from heddle_dask.core.state import State
from heddle_dask.core.transitions import TrajectoryEvent, TrajectoryState
from heddle_dask.core.view import Admit


class BoundedStaleness:
    """The controller's handler of optimiser steps, groups and cancellations."""

    def __init__(self, state: State, runs: StrategyTable) -> None:
        self.state = state
        self.runs = runs

    # -- credits -----------------------------------------------------------------------------------

    def submitted(self, trajectory: Trajectory) -> None:
        """A trajectory waits for admission, once it has a credit where its run has a bound."""
        run = self.state.run_of(trajectory)
        if run.ledger is None:
            self._show(trajectory)
            return
        run.ledger.submitted(trajectory.spec.group_id, trajectory.trajectory_id)
        if run.ledger.has_credit(trajectory.spec.group_id, trajectory.trajectory_id):
            self._show(trajectory)
        else:
            run.without_credit[trajectory.trajectory_id] = None
            self.grant(run)

    def grant(self, run: RunRecord) -> None:
        """Let the admission see the trajectories that have credits now."""
        if run.ledger is None or not run.without_credit:
            return
        for name in run.ledger.grant():
            run.without_credit.pop(name, None)
            self._show(self.state.trajectories[name])

    def _show(self, trajectory: Trajectory) -> None:
        self.state.wait_for_admission(trajectory)
        run = self.runs.of(trajectory)
        if run.strategies.predictor is None or trajectory.prediction is not None:
            run.rank(trajectory)

    def ended(self, trajectory: Trajectory, started: bool) -> None:
        """A trajectory has ended; `started`: its program ran."""
        run = self.state.run_of(trajectory)
        if run.ledger is None or trajectory.parent is not None:
            return
        run.without_credit.pop(trajectory.trajectory_id, None)
        useless = not started or bool(trajectory.cancelled)
        run.ledger.ended(trajectory.spec.group_id, trajectory.trajectory_id, useless)
        self.grant(run)

    def group_ended(self, event: ev.GroupEnded) -> bool:
        """A group is in the buffer or dropped; False for one of a run without a bound."""
        run = self.state.runs.get(event.run_id)
        if run is None or run.ledger is None:
            self.state.count_stale()
            return False
        run.ledger.group_ended(event.group_id, event.accepted)
        self.grant(run)
        return True

    # -- age ---------------------------------------------------------------------------------------

    def optimizer_step_ended(self, event: ev.OptimizerStepEnded) -> list[Command]:
        """There are credits for another batch, and some trajectories may be too old."""
        run = self.state.runs.get(event.run_id)
        if run is None or run.ledger is None or not run.ledger.step_ended(event.version):
            return self.state.count_stale()
        self.grant(run)
        return self.check(t for t in self.state.trajectories.values() if t.spec.run_id == event.run_id)

    def check_residents(self, engine: Engine) -> list[Command]:
        """Check what is on an engine, which has other weights now."""
        return self.check(self.state.trajectories[name] for name in list(engine.residents))

    def check(self, trajectories: Iterable[Trajectory]) -> list[Command]:
        """Cancel those that are too old, and the other members of their groups."""
        stale: dict[tuple[str, str], Trajectory] = {}
        for trajectory in trajectories:
            if self.is_stale(trajectory):
                stale.setdefault((trajectory.spec.run_id, trajectory.spec.group_id), trajectory)
        if not stale:
            return []
        members = [t for t in self.state.trajectories.values() if (t.spec.run_id, t.spec.group_id) in stale]
        return [command for member in members for command in self._cancel(member, STALE)]

    def is_stale(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory is to be cancelled because it exceeds the bound."""
        first = trajectory.first_version
        if first is None or trajectory.cancelled or trajectory.state is TrajectoryState.ENDED:
            return False
        ledger = self.state.run_of(trajectory).ledger
        if ledger is None or ledger.bound.mode != "cancel" or not trajectory.has_begun:
            return False
        return not ledger.is_valid(first)

    def redundant(self, event: ev.TrajectoryRedundant) -> list[Command]:
        """The driver has enough without a trajectory."""
        trajectory = self.state.trajectories.get(event.trajectory_id)
        commands = [] if trajectory is None else self._cancel(trajectory, REDUNDANT)
        return commands or self.state.count_stale()

    def _cancel(self, trajectory: Trajectory, cause: str) -> list[Command]:
        """Have a trajectory stopped; its branches end with it."""
        if trajectory.cancelled or trajectory.state is TrajectoryState.ENDED:
            return []
        trajectory.cancelled = cause
        if trajectory.parent is not None:
            return []
        run = self.state.run_of(trajectory)
        run.cancelled[cause] = run.cancelled.get(cause, 0) + 1
        self.state.stop_waiting_for_admission(trajectory)
        if run.ledger is not None and trajectory.state is TrajectoryState.SUBMITTED:
            run.ledger.ended(trajectory.spec.group_id, trajectory.trajectory_id, useless=True)
        return [CancelTrajectory(trajectory.trajectory_id, cause)]

    # -- versions ----------------------------------------------------------------------------------

    def started(self, trajectory: Trajectory, engine: Engine) -> list[Command]:
        """A step has started: with the first one the trajectory begins to age."""
        trajectory.policy_version = engine.version.number
        if trajectory.generated_tokens == 0 and (trajectory.parent is None or trajectory.first_version is None):
            trajectory.first_version = engine.version
        return self.check([trajectory])

    def answered(self, trajectory: Trajectory, event: ev.StepFinished) -> None:
        """A result says which version sampled its first token; it is not counted yet."""
        engine = self.state.engines.get(event.engine_id)
        version = PolicyVersion() if engine is None else engine.version
        if event.policy_version >= 0:
            version = PolicyVersion(version.lineage, event.policy_version)
            self.state.take_version(version)
            trajectory.policy_version = event.policy_version
        trajectory.kv_version = version
        if engine is not None and version.number < engine.version.number:
            trajectory.kv_version = engine.version  # it has recomputed the cache meanwhile, or dropped it
        inherited = trajectory.parent is not None and trajectory.first_version is not None
        if trajectory.generated_tokens or inherited:
            return
        before = trajectory.first_version
        begun_before = before is not None and not before.lineage and version.number > before.number
        if not event.new_tokens:
            trajectory.first_version = None  # it is still to begin
        elif before is None or before.lineage == version.lineage or begun_before:
            trajectory.first_version = version


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
        commands: list[Command] = [self._start(each, at) for each in proposals if not each.trajectory.cancelled]
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
