"""The only entry point: `Controller.handle(event) -> [command, ...]`.

The controller tracks trajectories and their steps. Each of its handlers is responsible for one kind of decision, from
the strategy's proposal to the command.

Pure: no clock, no socket, no randomness except in seeded strategies. The same events in the same order give the same
commands; a journal of a live run can therefore be replayed.

Promises
--------
- Every requested step is, at any time, exactly one of: waiting, commanded to one engine, ended.
- A message of a superseded attempt or of another engine changes nothing and is counted as stale.
- A step or action whose worker dies is commanded again. A step that was generating, or an action that was running,
  at more than `max_losses` such deaths is given up, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from heddle_dask.core import events as ev
from heddle_dask.core.actions import Actions
from heddle_dask.core.admissions import Admissions, BoundedStaleness
from heddle_dask.core.commands import Command, DropContext, PredictRemaining
from heddle_dask.core.engines import Deployments, Drains, EngineMembership
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import RunId, StepId
from heddle_dask.core.migrations import Migrations
from heddle_dask.core.nouns import TrajectorySpec
from heddle_dask.core.placements import HeldSteps, Placements
from heddle_dask.core.run_description import RetryPolicy, RunDescription
from heddle_dask.core.run_strategies import BuildStrategies, StrategyTable
from heddle_dask.core.snapshot import ClusterSnapshot, run_counts, snapshot_of
from heddle_dask.core.state import State
from heddle_dask.core.stealing import WorkStealing
from heddle_dask.core.transitions import OVER, STEP_STATES, EngineState, KvEvent, TrajectoryEvent, TrajectoryState
from heddle_dask.core.view import ClusterView, StrategySet
from heddle_dask.core.weight_updates import WeightUpdates


class Controller:
    """Turns events into commands through strategies and guards.

    Parameters
    ----------
    strategies, retries
        Of the first run.
    build
        Builds the strategies of a run that joins; None: there is only one run.
    """

    def __init__(
        self,
        strategies: StrategySet,
        retries: RetryPolicy | None = None,
        build: BuildStrategies | None = None,
    ) -> None:
        self.state = State()
        self.view = ClusterView(self.state)
        self.strategies = strategies
        self.retries = retries or RetryPolicy()
        self.runs = StrategyTable(self.state, build)
        self.runs.add(RunDescription(retries=self.retries), strategies)
        self.held = HeldSteps(self.state)
        self.admissions = Admissions(self.state, self.runs)
        self.actions = Actions(self.state, self.view, strategies.actions, self.retries)
        self.moves = Migrations(self.state, self.runs)
        self.placements = Placements(self.state, self.runs, self.held, self.moves)
        self.stealing = WorkStealing(self.state, self.runs, self.held, self.placements)
        self.drains = Drains(self.state, self.moves, self.held)
        self.updates = WeightUpdates(self.state, self.moves)
        self.staleness = BoundedStaleness(self.state, self.runs)
        self.engines = EngineMembership(
            self.state, self.runs, self.placements, self.held, self.moves, self.drains, self.updates
        )
        self.deployments = Deployments(self.state)
        self._handlers: dict[type, Callable[[Any], list[Command]]] = {
            ev.RunStarted: self._run_started,
            ev.RunEnded: self._run_ended,
            ev.TrajectorySubmitted: self._trajectory_submitted,
            ev.TrajectoryForked: self._trajectory_forked,
            ev.ProgramEnded: self._program_ended,
            ev.TrajectoryEnded: self._trajectory_ended,
            ev.StepRequested: self._step_requested,
            ev.StepStarted: self._step_started,
            ev.StepFinished: self._step_finished,
            ev.StepFailed: self._step_failed,
            ev.StepCancelled: self._step_cancelled,
            ev.PredictionMade: self._prediction_made,
            ev.MoveEnded: self._move_ended,
            ev.PoolsDeclared: self.actions.pools_declared,
            ev.TimeReached: self._time_reached,
            ev.ActionRequested: self._action_requested,
            ev.ActionFinished: self.actions.finished,
            ev.ActionCancelled: self.actions.cancelled,
            ev.SandboxClosed: self.actions.sandbox_closed,
            ev.EngineJoined: self._engine_joined,
            ev.EngineLost: self.engines.lost,
            ev.EngineDraining: self._engine_draining,
            ev.EngineExpiring: self.drains.expiring,
            ev.HostJoined: self.actions.host_joined,
            ev.HostDraining: self.actions.host_draining,
            ev.HostLost: self.actions.host_lost,
            ev.ServiceLoaded: self.actions.service_loaded,
            ev.ServiceEvicted: self.actions.service_evicted,
            ev.ServiceLost: self.actions.service_lost,
            ev.DegreesRequested: self.deployments.requested,
            ev.DegreesPlanned: self.deployments.planned,
            ev.OptimizerStepEnded: self._optimizer_step_ended,
            ev.WeightsPublished: self._weights_published,
            ev.WeightsFetched: self.engines.weights_fetched,
            ev.SwitchRequested: self.updates.switch_requested,
            ev.WeightsInstalled: self._weights_installed,
            ev.GroupEnded: self._group_ended,
            ev.TrajectoryRedundant: self.staleness.redundant,
        }

    def handle(self, event: ev.Event) -> list[Command]:
        """Process one event; returns the commands to carry out.

        Raises
        ------
        InvalidTransition, GuardViolation, KeyError
            The event is impossible in this state, or a strategy proposed an invalid command. Both are bugs; the
            controller does not catch them.
        """
        self.state.at = event.at
        stale_before = self.state.stale_events
        commands = self._handlers[type(event)](event)
        if self.state.stale_events == stale_before:
            commands = [*commands, *self.stealing.take(event.at)]
        commands = [*commands, *self.held.send(event.at)]
        if self.state.draining:
            commands = [*commands, *self.drains.release_empty()]
        return commands

    def snapshot(self) -> ClusterSnapshot:
        """A frozen view of the cluster as of the latest event."""
        return snapshot_of(self.state, self.moves.totals)

    def run_counts(self, run_id: RunId) -> dict[str, Any]:
        """JSON-able totals for the display of one run's driver."""
        return run_counts(self.state, self.moves.totals, run_id)

    def awaits(self, step_id: StepId) -> bool:
        """Whether this step has not ended: it waits for an engine, or an engine was commanded to run it.

        The body checks this before it reports a result that may have been reported before, and for a task that came
        back from a dead worker: a step that has ended is never commanded again.
        """
        return self._open(step_id) is not None

    # -- runs --------------------------------------------------------------------------------------

    def _run_started(self, event: ev.RunStarted) -> list[Command]:
        run = event.run
        if run.run_id in self.runs:
            self.state.add_run(run)
            return []
        self.runs.add(run)
        self.actions.allocate_by(self.runs.allocation)
        return self.held.recall() if len(self.state.runs) == 2 else []

    def _run_ended(self, event: ev.RunEnded) -> list[Command]:
        """End what is left of a run; what it had is free for the others."""
        if event.run_id not in self.runs:
            return self.state.count_stale()
        mine = [t for t in self.state.trajectories.values() if t.spec.run_id == event.run_id]
        commands: list[Command] = []
        for trajectory in mine:
            if trajectory.state is not TrajectoryState.ENDED:
                commands += self._close(trajectory, "its run ended", event.at)
        self.runs.remove(event.run_id)
        if self.state.runs:
            self.actions.allocate_by(self.runs.allocation)
        return [*commands, *self._use_what_is_free(event.at)]

    # -- trajectories ------------------------------------------------------------------------------

    def _trajectory_submitted(self, event: ev.TrajectorySubmitted) -> list[Command]:
        trajectory = self._enter(event.trajectory)
        self.staleness.submitted(trajectory)
        return [*self._predict(trajectory), *self.admissions.admit(event.at)]

    def _trajectory_forked(self, event: ev.TrajectoryForked) -> list[Command]:
        parent = self.state.trajectories.get(event.parent)
        if parent is None or parent.state in OVER:
            return self.state.count_stale()
        trajectory = self._enter(event.trajectory)
        trajectory.parent = parent.trajectory_id
        trajectory.first_version, trajectory.cancelled = parent.first_version, parent.cancelled
        self.admissions.enter(trajectory, event.at)
        return self._predict(trajectory)

    def _enter(self, spec: TrajectorySpec) -> Trajectory:
        """A new trajectory, which is neither waiting for admission nor admitted."""
        if spec.trajectory_id in self.state.trajectories:
            raise KeyError(f"trajectory {spec.trajectory_id} was submitted before")
        if spec.run_id not in self.runs:
            raise KeyError(f"trajectory {spec.trajectory_id} is of run {spec.run_id}, which is not open")
        trajectory = Trajectory(spec=spec, number=self.state.next_number())
        trajectory.context_tokens = spec.prompt_tokens
        trajectory.policy_version = self.state.policy_version
        self.state.trajectories[spec.trajectory_id] = trajectory
        self.placements.submitted(trajectory)
        self.state.join_group(spec.group_id)
        return trajectory

    def _program_ended(self, event: ev.ProgramEnded) -> list[Command]:
        trajectory = self.state.trajectories.get(event.trajectory_id)
        if trajectory is None or trajectory.state in OVER:
            return self.state.count_stale()
        commands = self._leave(trajectory, TrajectoryEvent.PROGRAM_ENDED, "trajectory ended", event.at)
        return [*commands, *self._use_what_is_free(event.at)]

    def _trajectory_ended(self, event: ev.TrajectoryEnded) -> list[Command]:
        trajectory = self.state.trajectories.get(event.trajectory_id)
        if trajectory is None or trajectory.state is TrajectoryState.ENDED:
            return self.state.count_stale()
        scored = trajectory.state is TrajectoryState.SCORING
        commands = self._close(trajectory, "trajectory ended", event.at)
        bounded = self.state.run_of(trajectory).ledger is not None  # its end may free a credit
        if scored and not bounded:
            return [*commands, *self.actions.allocate()]
        return [*commands, *self._use_what_is_free(event.at)]

    def _close(self, trajectory: Trajectory, reason: str, at: float) -> list[Command]:
        """End a trajectory, without deciding who gets what it had."""
        started = trajectory.state is not TrajectoryState.SUBMITTED
        if trajectory.state is not TrajectoryState.SCORING:
            commands = self._leave(trajectory, TrajectoryEvent.ENDED, reason, at)
            self.staleness.ended(trajectory, started)
            return commands
        trajectory.advance(TrajectoryEvent.ENDED, at)
        self.staleness.ended(trajectory, started)
        commands = self.actions.cancel_all(trajectory)
        self.state.forget_if_over(trajectory)
        return commands

    def _leave(self, trajectory: Trajectory, how: TrajectoryEvent, reason: str, at: float) -> list[Command]:
        """The trajectory gives back its engine, its KV cache, its place and its actions."""
        was, name = trajectory.state, trajectory.trajectory_id
        commands: list[Command] = []
        if trajectory.home is not None:
            commands.append(DropContext(name, trajectory.home))
        commands += trajectory.abort_step(reason)
        self.held.take_out(trajectory)
        self.state.unbind(trajectory)
        self.state.uncount_inflight(trajectory, was is TrajectoryState.GENERATING)
        self.state.stop_waiting_for_admission(trajectory)
        self.state.release_reservation(trajectory)
        self.state.set_home(trajectory, None)
        trajectory.advance_kv(KvEvent.DROPPED)
        trajectory.advance(how, at)
        trajectory.step = None
        self.runs.of(trajectory).forget(trajectory)
        self.moves.trajectory_ended(trajectory)
        self.placements.trajectory_ended(trajectory)
        self.state.leave_group(trajectory.spec.group_id)
        if was is not TrajectoryState.SUBMITTED:
            self.state.uncount_alive(trajectory)
        commands += self.actions.cancel_all(trajectory)
        self.state.forget_if_over(trajectory)
        return commands

    def _use_what_is_free(self, at: float) -> list[Command]:
        """A dropped action may have blocked the head of the queue, an aborted step a slot of a full engine."""
        return [*self.placements.place_waiting(at), *self.actions.allocate(), *self.admissions.admit(at)]

    # -- steps -------------------------------------------------------------------------------------

    def _step_requested(self, event: ev.StepRequested) -> list[Command]:
        step, step_id = event.step, event.step.step_id
        trajectory = self.state.trajectories.get(step_id.trajectory_id)
        if trajectory is None or not trajectory.advance(TrajectoryEvent.STEP_REQUESTED, event.at):
            return self.state.count_stale()
        if trajectory.step is None or trajectory.step.step_id.step_index != step_id.step_index:
            trajectory.losses = 0
            trajectory.preemptions = 0
            trajectory.was_taken = False
        trajectory.step = step
        trajectory.requested_at = event.at
        trajectory.first_context_tokens = trajectory.first_context_tokens or step.context_tokens
        if trajectory.steps_finished and step_id.attempt == 0:
            self.state.count_observed(trajectory, max(0, step.context_tokens - trajectory.context_tokens))
        self.moves.step_requested(trajectory)
        self.state.set_context(trajectory, step.context_tokens)
        self.state.waiting_steps[step_id.trajectory_id] = None
        cancelled = self.staleness.check([trajectory])
        return [
            *cancelled,
            *(self.engines.give_up_if_hopeless(trajectory, event.at) or self.placements.place(trajectory, event.at)),
        ]

    def _current(self, event: ev.StepStarted | ev.StepFinished | ev.StepFailed) -> tuple[Trajectory, Engine] | None:
        """The trajectory and the engine of a step's event; None when its attempt or its engine is superseded."""
        trajectory = self.state.trajectories.get(event.step_id.trajectory_id)
        if trajectory is None or trajectory.counted_on != event.engine_id:
            return None
        if trajectory.step is None or trajectory.step.step_id != event.step_id:
            return None
        return trajectory, self.state.engines[event.engine_id]

    def _step_started(self, event: ev.StepStarted) -> list[Command]:
        current = self._current(event)
        if current is None or not current[0].advance(TrajectoryEvent.STARTED, event.at):
            return self.state.count_stale()
        self.state.count_running(*current)
        return self.staleness.started(*current)

    def _step_finished(self, event: ev.StepFinished) -> list[Command]:
        current = self._current(event)
        if current is None:
            return self.state.count_stale()
        trajectory, engine = current
        if engine.state is not EngineState.LOST:
            trajectory.advance_kv(KvEvent.WRITTEN)
        self._end_step(trajectory, engine, event.at)
        # An admission by KV use has new data after every result; usually no trajectory waits.
        commands = self._count_answer(trajectory, event)
        return [*commands, *self.placements.place_waiting(event.at), *self.admissions.admit(event.at)]

    def _count_answer(self, trajectory: Trajectory, event: ev.StepFinished) -> list[Command]:
        self.state.evictions += trajectory.was_evicted(event)
        self.state.set_context(trajectory, trajectory.context_tokens + event.new_tokens)
        if event.new_tokens:
            trajectory.kept_on, trajectory.kept_tokens = event.engine_id, trajectory.context_tokens
        self.staleness.answered(trajectory, event)
        whole = event.finish_reason != "abort"
        if whole:
            self.state.unbind(trajectory)
        self.state.take_tokens(trajectory, event.new_tokens, whole)
        self.runs.of(trajectory).step_answered(trajectory, event)
        cancelled = self.staleness.check([trajectory])
        return [*cancelled, *self._predict(trajectory)] if whole else cancelled

    def _predict(self, trajectory: Trajectory) -> list[Command]:
        """Request a prediction, without effect if there is no predictor. The trajectory does not wait for it."""
        if self.runs.of(trajectory).strategies.predictor is None:
            return []
        return [PredictRemaining(trajectory.trajectory_id)]

    def _prediction_made(self, event: ev.PredictionMade) -> list[Command]:
        trajectory = self.state.trajectories.get(event.trajectory_id)
        if trajectory is None or trajectory.state in OVER:
            return self.state.count_stale()
        if event.steps_finished != trajectory.steps_finished:
            return self.state.count_stale()
        self.state.run_of(trajectory).observed_per_token = event.prediction.observation_per_token
        self.state.take_prediction(trajectory, event.prediction)
        if trajectory.state is TrajectoryState.SUBMITTED:
            if trajectory.trajectory_id not in self.state.unadmitted:
                return []  # it waits for a credit, or is cancelled
            self.runs.of(trajectory).rank(trajectory)
            return self.admissions.admit(event.at)
        if trajectory.home in self.state.draining:
            return self.drains.leave(trajectory)
        return self.moves.consider(trajectory)

    def _move_ended(self, event: ev.MoveEnded) -> list[Command]:
        commands = self.moves.ended(event)
        if event.trajectory_id in self.state.waiting_steps:
            commands += self.placements.place(self.state.trajectories[event.trajectory_id], event.at)
        return [*commands, *self.updates.install_next()]

    def _step_cancelled(self, event: ev.StepCancelled) -> list[Command]:
        trajectory = self._open(event.step_id)
        if trajectory is None:
            return self.state.count_stale()
        commands = trajectory.abort_step("cancelled by its program")
        if trajectory.counted_on is None:
            self.placements.withdraw(trajectory, event.at)
        else:
            self._end_step(trajectory, self.state.engines[trajectory.counted_on], event.at)
        return [*commands, *self.placements.place_waiting(event.at), *self.admissions.admit(event.at)]

    def _open(self, step_id: StepId) -> Trajectory | None:
        """The trajectory of a step that waits or runs anywhere; None when the step has ended."""
        trajectory = self.state.trajectories.get(step_id.trajectory_id)
        step = None if trajectory is None else trajectory.step
        if trajectory is None or step is None or trajectory.state not in STEP_STATES:
            return None
        return trajectory if step.step_id == step_id else None

    def _step_failed(self, event: ev.StepFailed) -> list[Command]:
        current = self._current(event)
        if current is None:
            return self.state.count_stale()
        trajectory, engine = current
        # The engine died and its worker lives. Only a step that held a slot can have caused that.
        died = event.cause == ev.ENGINE_LOST and trajectory.state is TrajectoryState.GENERATING
        trajectory.losses += died
        self._end_step(trajectory, engine, event.at)
        return self.placements.place_waiting(event.at)

    def _end_step(self, trajectory: Trajectory, engine: Engine, at: float) -> None:
        was_generating = trajectory.state is TrajectoryState.GENERATING
        self.held.take_out(trajectory)
        self.state.uncount_inflight(trajectory, was_generating)
        trajectory.advance(TrajectoryEvent.STEP_ENDED, at)
        trajectory.resting_tools_s = 0.0
        if engine.expiring:
            trajectory.advance_kv(KvEvent.DROPPED)
        if engine.state is EngineState.LOST or engine.expiring:
            self.state.set_home(trajectory, None)

    # -- actions -----------------------------------------------------------------------------------

    def _action_requested(self, event: ev.ActionRequested) -> list[Command]:
        """Request the action. The label of a tool is a feature, so the prediction is repeated during the call."""
        stale_before = self.state.stale_events
        commands = self.actions.requested(event)
        if self.state.stale_events > stale_before:
            return commands
        trajectory = self.state.trajectories[event.action.trajectory_id]
        if trajectory.state in OVER:
            return commands
        commands += self.drains.leave(trajectory)
        return [*commands, *self._predict(trajectory)] if event.action.kind == "tool" else commands

    # -- engines -----------------------------------------------------------------------------------

    def _engine_draining(self, event: ev.EngineDraining) -> list[Command]:
        stale_before = self.state.stale_events
        commands = self.drains.draining(event)
        if self.state.stale_events == stale_before:
            commands += self.updates.leaves(self.state.engines[event.engine_id])
        # What was held for that engine, or was to get its KV cache or newer weights there, waits for another one.
        return [*commands, *self.placements.place_waiting(event.at)]

    def _engine_joined(self, event: ev.EngineJoined) -> list[Command]:
        return [*self.engines.joined(event), *self.admissions.admit(event.at)]

    # -- weights and training ----------------------------------------------------------------------

    def _time_reached(self, event: ev.TimeReached) -> list[Command]:
        return [*self.updates.time_reached(event), *self.actions.time_reached(event)]

    def _weights_published(self, event: ev.WeightsPublished) -> list[Command]:
        # Engines that were about to install older ones fetch again: nothing waits for them any more.
        return [*self.updates.published(event), *self.placements.place_waiting(event.at)]

    def _weights_installed(self, event: ev.WeightsInstalled) -> list[Command]:
        commands = self.engines.weights_installed(event)
        engine = self.state.engines.get(event.engine_id)
        stale = [] if engine is None else self.staleness.check_residents(engine)
        return [*commands, *stale, *self.admissions.admit(event.at)]

    def _optimizer_step_ended(self, event: ev.OptimizerStepEnded) -> list[Command]:
        commands = self.staleness.optimizer_step_ended(event)
        # Under another lineage n may be smaller: weights may be new enough now that were not.
        return [*commands, *self.placements.place_waiting(event.at), *self.admissions.admit(event.at)]

    def _group_ended(self, event: ev.GroupEnded) -> list[Command]:
        return self.admissions.admit(event.at) if self.staleness.group_ended(event) else []
