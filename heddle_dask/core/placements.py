"""Placements: the engine of each waiting step, preemptions on that engine, and steps that are given up.

Strategies choose the engine, the priority and the victim of a preemption; guards refuse invalid choices. A step that no
engine can take is given up at once; a step that the placement declines waits for the next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heddle_dask.core import guards
from heddle_dask.core.commands import PREEMPTED_FOR, Command, GiveUpStep, StartStep
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import TrajectoryId
from heddle_dask.core.state import State
from heddle_dask.core.transitions import TrajectoryEvent
from heddle_dask.core.view import ClusterView, PlansBatches, StrategySet


class Placements:
    """Steps that wait for an engine; the controller decides when to place them.

    Parameters
    ----------
    max_preemptions
        Maximum number of preemptions of one step.
    """

    def __init__(
        self,
        state: State,
        view: ClusterView,
        strategies: StrategySet,
        max_preemptions: int,
    ) -> None:
        self.state = state
        self.view = view
        self.placement = strategies.placement
        self.scheduling = strategies.scheduling
        self.preemption = strategies.preemption
        self.max_preemptions = max_preemptions
        self._unplanned: dict[TrajectoryId, None] = {}
        self._unplaced: dict[TrajectoryId, None] = {}  # planned, with no step placed yet

    def submitted(self, trajectory: Trajectory) -> None:
        """Include a submitted trajectory in the next plan of a placement that plans batches."""
        self._unplanned[trajectory.trajectory_id] = None

    def trajectory_ended(self, trajectory: Trajectory) -> None:
        """Drop the waiting step of an ended trajectory, and remove it from the next plan."""
        self.state.waiting_steps.pop(trajectory.trajectory_id, None)
        self._unplanned.pop(trajectory.trajectory_id, None)
        self._unplaced.pop(trajectory.trajectory_id, None)

    def engine_joined(self) -> None:
        """Plan the trajectories without a placed step again, so that a new engine gets its share."""
        self._unplanned = {**self._unplaced, **self._unplanned}
        self._unplaced.clear()

    def place_waiting(self, at: float) -> list[Command]:
        """Place all waiting steps for which an engine is chosen now, oldest first."""
        if not self.state.ready_engines:
            return []
        commands: list[Command] = []
        for trajectory_id in list(self.state.waiting_steps):
            commands += self.place(self.state.trajectories[trajectory_id], at)
        return commands

    def place(self, trajectory: Trajectory, at: float) -> list[Command]:
        """Start the waiting step of this trajectory if an engine is chosen for it."""
        step = trajectory.step
        assert step is not None, trajectory.trajectory_id
        ready = self.state.ready_engines
        if not ready or not guards.can_dispatch(trajectory):
            return []
        candidates: Sequence[Engine] = ready
        if step.context_tokens >= self.state.least_max_context:
            candidates = [engine for engine in ready if guards.can_take(engine, step)]
        if not candidates:
            longest = max(engine.spec.max_context_tokens for engine in ready)
            return self.give_up(
                trajectory, at, f"context of {step.context_tokens} tokens, engines take {longest}"
            )
        if trajectory.trajectory_id in self._unplanned:
            self._plan_batch(ready)
        choice = self.placement.choose_engine(trajectory, step, candidates)
        if choice is None:
            return []
        guards.check_choice(trajectory, step, choice, candidates)
        start = self._dispatch(trajectory, choice, at)
        stops = self._preempt_for(trajectory, choice)
        return [replace(start, bypass_queue=True), *stops] if stops else [start]

    def _plan_batch(self, engines: Sequence[Engine]) -> None:
        """Let the placement plan the trajectories that wait for a plan; other placements ignore batches."""
        if isinstance(self.placement, PlansBatches):
            batch = [self.state.trajectories[name] for name in self._unplanned]
            homeless = [t for t in batch if t.home is None]
            self.placement.plan(homeless, engines)
            self._unplaced.update((t.trajectory_id, None) for t in homeless)
        self._unplanned.clear()

    def _dispatch(self, trajectory: Trajectory, engine: Engine, at: float) -> StartStep:
        step = trajectory.step
        assert step is not None, trajectory.trajectory_id
        order = self.state.next_number()
        priority = self.scheduling.priority(self.view, trajectory, step, order)
        trajectory.priority = priority
        source = trajectory.home
        self.state.waiting_steps.pop(trajectory.trajectory_id, None)
        self._unplaced.pop(trajectory.trajectory_id, None)
        self.state.release_reservation(trajectory)
        self.state.set_home(trajectory, engine.engine_id)
        self.state.count_inflight(trajectory, engine.engine_id)
        if source in self.state.draining and source is not None:
            self.state.engines[source].feeding[trajectory.trajectory_id] = None
        engine.placed += 1
        trajectory.advance(TrajectoryEvent.PLACED, at)
        return StartStep(
            step_id=step.step_id,
            engine_id=engine.engine_id,
            priority=priority,
            order=order,
            source_engine_id=source,
        )

    def _preempt_for(self, trajectory: Trajectory, engine: Engine) -> list[Command]:
        """Preempt a running step if this one has to wait for a slot and the strategy names a victim."""
        if self.preemption is None or len(engine.inflight) <= engine.spec.slots:
            return []
        if len(engine.inflight) - engine.stopping <= engine.spec.slots:
            return []  # a slot is about to be free, and no other step waits for it
        most = self.max_preemptions
        running = [other for other in engine.running.values() if other.preemptions < most]
        victim = self.preemption.victim(trajectory, running) if running else None
        if victim is None:
            return []
        guards.check_victim(trajectory, victim, running, most)
        self.state.mark_stopping(victim, engine)
        return victim.abort_step(f"{PREEMPTED_FOR}{trajectory.trajectory_id}")

    def give_up(self, trajectory: Trajectory, at: float, cause: str) -> list[Command]:
        """Give up the waiting step of this trajectory."""
        step = trajectory.step
        assert step is not None, trajectory.trajectory_id
        # The driver will send TrajectoryEnded; until then the step neither waits nor runs.
        self.withdraw(trajectory, at)
        return [GiveUpStep(step.step_id, cause)]

    def withdraw(self, trajectory: Trajectory, at: float) -> None:
        """Withdraw the trajectory's waiting step."""
        self.state.waiting_steps.pop(trajectory.trajectory_id, None)
        trajectory.advance(TrajectoryEvent.PLACED, at)
        trajectory.advance(TrajectoryEvent.STEP_ENDED, at)
