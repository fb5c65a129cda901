"""The one door: `Controller.handle(event) -> [command, ...]`.

Pure: no clock, no socket, no randomness but what the strategies were seeded with. The same events in the
same order give the same commands; a journal of a live run can therefore be replayed.

Promises
--------
- Every requested step is, at any time, exactly one of: waiting, commanded to one engine, ended.
- A message of a superseded attempt or of another engine changes nothing and is counted as late.
- A step or action that died with its worker is commanded again, at most `max_losses` times; then it is
  given up, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from heddle_dask.core import events as ev
from heddle_dask.core import guards
from heddle_dask.core.action_desk import ActionDesk
from heddle_dask.core.commands import (
    AbortStep,
    AdmitTrajectory,
    Command,
    GiveUpStep,
    PredictRemaining,
    StartStep,
)
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.core.move_desk import MoveDesk
from heddle_dask.core.regroup_desk import RegroupDesk
from heddle_dask.core.state import State
from heddle_dask.core.transitions import (
    STEP_STATES,
    EngineEvent,
    EngineState,
    KvEvent,
    TrajectoryEvent,
    TrajectoryState,
)
from heddle_dask.core.view import ClusterView, PlansBatches, RanksWaiting, StrategySet


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that no strategy may lift.

    Attributes
    ----------
    max_losses
        How often one step or action may die with its worker before it is given up. A request that kills
        its engine must not kill every engine in turn.
    max_preemptions
        How often one step may be stopped for others.
    """

    max_losses: int = 3
    max_preemptions: int = 2


class Controller:
    """Turns events into commands through strategies and guards."""

    def __init__(self, strategies: StrategySet, limits: Limits | None = None) -> None:
        self.state = State()
        self.view = ClusterView(self.state)
        self.strategies = strategies
        self.limits = limits or Limits()
        self.actions = ActionDesk(self.state, self.view, strategies.actions, self.limits.max_losses)
        self._unplanned: dict[TrajectoryId, None] = {}
        self._unplaced: dict[TrajectoryId, None] = {}  # planned, and no step of it was placed yet
        admission = strategies.admission
        self._ranks = admission if isinstance(admission, RanksWaiting) else None
        self.moves = MoveDesk(self.state, self.view, strategies.migration)
        self.regroups = RegroupDesk(self.state, self.view, self.moves, strategies.regrouping)
        self._handlers: dict[type, Callable[[Any], list[Command]]] = {
            ev.TrajectorySubmitted: self._trajectory_submitted,
            ev.TrajectoryEnded: self._trajectory_ended,
            ev.StepRequested: self._step_requested,
            ev.StepStarted: self._step_started,
            ev.StepFinished: self._step_finished,
            ev.StepDelivered: self._step_delivered,
            ev.StepFailed: self._step_failed,
            ev.PredictionMade: self._prediction_made,
            ev.MoveEnded: self._move_ended,
            ev.ActionRequested: self.actions.requested,
            ev.ActionFinished: self.actions.finished,
            ev.EngineJoined: self._engine_joined,
            ev.EngineLost: self._engine_lost,
            ev.EngineDraining: self._engine_draining,
            ev.RegroupEnded: self.regroups.ended,
            ev.HostJoined: self.actions.host_joined,
            ev.HostLost: self.actions.host_lost,
        }

    def handle(self, event: ev.Event) -> list[Command]:
        """Take one fact, return what is to be done about it.

        Raises
        ------
        InvalidTransition, GuardViolation, KeyError
            The event cannot be true, or a strategy proposed nonsense: bugs, never swallowed.
        """
        late_before = self.state.late_arrivals
        commands = self._handlers[type(event)](event)
        if self.strategies.regrouping is None or self.state.late_arrivals > late_before:
            return commands
        return [*commands, *self.regroups.after(event), *self._placed_again(event)]

    def _placed_again(self, event: ev.Event) -> list[Command]:
        """Engines that were called back take what waits, if nobody else was there."""
        return self._place_waiting(event.at) if self.regroups.took_back() else []

    # -- trajectories ------------------------------------------------------------------------------

    def _trajectory_submitted(self, event: ev.TrajectorySubmitted) -> list[Command]:
        spec = event.trajectory
        if spec.trajectory_id in self.state.trajectories:
            raise KeyError(f"trajectory {spec.trajectory_id} was submitted before")
        trajectory = Trajectory(spec=spec, number=self.state.next_number())
        trajectory.context_tokens = spec.prompt_tokens
        self.state.trajectories[spec.trajectory_id] = trajectory
        self.state.unadmitted[spec.trajectory_id] = None
        self._unplanned[spec.trajectory_id] = None
        self.state.join_group(spec.group_id)
        if self.strategies.predictor is None:
            self._rank(trajectory)
        return [*self._predict(trajectory), *self._admit(event.at)]

    def _rank(self, trajectory: Trajectory) -> None:
        if self._ranks is not None:
            self._ranks.rank(trajectory)

    def _admit(self, at: float) -> list[Command]:
        if not self.state.unadmitted:
            return []
        commands: list[Command] = []
        chosen = self.strategies.admission.admit(self.view)
        self.state.freed.clear()
        for trajectory in chosen:
            guards.check_admission(trajectory)
            del self.state.unadmitted[trajectory.trajectory_id]
            trajectory.advance(TrajectoryEvent.ADMITTED, at)
            trajectory.admitted_at = at
            self.state.count_alive(trajectory)
            commands.append(AdmitTrajectory(trajectory.trajectory_id))
        return commands

    def _trajectory_ended(self, event: ev.TrajectoryEnded) -> list[Command]:
        trajectory = self.state.trajectories.get(event.trajectory_id)
        if trajectory is None or trajectory.state is TrajectoryState.ENDED:
            return self.state.late()
        was = trajectory.state
        commands = self._abort_open_step(trajectory, "trajectory ended")
        self.state.uncount_inflight(trajectory, was is TrajectoryState.GENERATING)
        self.state.waiting_steps.pop(event.trajectory_id, None)
        self.state.unadmitted.pop(event.trajectory_id, None)
        self.state.set_home(trajectory, None)
        trajectory.advance_kv(KvEvent.DROPPED)
        trajectory.advance(TrajectoryEvent.ENDED, event.at)
        trajectory.step = None
        self.moves.trajectory_ended(trajectory)
        self._unplanned.pop(event.trajectory_id, None)
        self._unplaced.pop(event.trajectory_id, None)
        self.state.leave_group(trajectory.spec.group_id)
        if was is not TrajectoryState.SUBMITTED:
            self.state.uncount_alive(trajectory)
        commands += self.actions.cancel_all(trajectory)
        self.state.forget_if_over(trajectory)
        # A dropped action may have stood at the head of the line, an aborted step on a full engine.
        return [*commands, *self._place_waiting(event.at), *self.actions.allocate(), *self._admit(event.at)]

    def _abort_open_step(self, trajectory: Trajectory, reason: str) -> list[Command]:
        step, engine_id = trajectory.step, trajectory.counted_on
        if step is None or engine_id is None:
            return []
        return [AbortStep(trajectory.trajectory_id, step.step_index, step.attempt, engine_id, reason)]

    # -- steps -------------------------------------------------------------------------------------

    def _step_requested(self, event: ev.StepRequested) -> list[Command]:
        step = event.step
        trajectory = self.state.trajectories.get(step.trajectory_id)
        if trajectory is None or not trajectory.advance(TrajectoryEvent.STEP_REQUESTED, event.at):
            return self.state.late()
        if trajectory.step is None or trajectory.step.step_index != step.step_index:
            trajectory.losses = 0
            trajectory.preemptions = 0
        trajectory.step = step
        trajectory.requested_at = event.at
        trajectory.first_context_tokens = trajectory.first_context_tokens or step.context_tokens
        if trajectory.steps_finished and step.attempt == 0:
            self.state.observed_tokens += max(0, step.context_tokens - trajectory.context_tokens)
        self.moves.step_requested(trajectory)
        self.state.set_context(trajectory, step.context_tokens)
        self.state.waiting_steps[step.trajectory_id] = None
        return self._place(trajectory, event.at)

    def _place(self, trajectory: Trajectory, at: float) -> list[Command]:
        step = trajectory.step
        assert step is not None, trajectory.trajectory_id
        ready = self.state.ready_engines
        if not ready or not guards.can_dispatch(trajectory):
            return []
        candidates = ready
        if step.context_tokens >= self.state.least_max_context:
            candidates = [engine for engine in ready if guards.can_take(engine, step)]
        if not candidates:
            longest = max(engine.spec.max_context_tokens for engine in ready)
            return self._give_up_step(
                trajectory, at, f"context of {step.context_tokens} tokens, engines take {longest}"
            )
        if trajectory.trajectory_id in self._unplanned:
            self._plan_batch(ready)
        choice = self.regroups.destination(trajectory, candidates)
        if choice is None:
            choice = self.strategies.placement.choose_engine(trajectory, step, candidates)
        if choice is None:
            return []
        guards.check_choice(trajectory, step, choice, candidates)
        return [self._dispatch(trajectory, choice, at), *self._preempt_for(trajectory, choice)]

    def _plan_batch(self, engines: Sequence[Engine]) -> None:
        """Let the placement see everything that was submitted since it planned last."""
        placement = self.strategies.placement
        if isinstance(placement, PlansBatches):
            batch = [self.state.trajectories[name] for name in self._unplanned]
            homeless = [t for t in batch if t.home is None]
            placement.plan(homeless, engines)
            self._unplaced.update((t.trajectory_id, None) for t in homeless)
        self._unplanned.clear()

    def _dispatch(self, trajectory: Trajectory, engine: Engine, at: float) -> StartStep:
        step = trajectory.step
        assert step is not None, trajectory.trajectory_id
        order = self.state.next_number()
        priority = self.strategies.scheduling.priority(self.view, trajectory, step, order)
        trajectory.priority = priority
        source = trajectory.home
        self.state.waiting_steps.pop(trajectory.trajectory_id, None)
        self._unplaced.pop(trajectory.trajectory_id, None)
        self.state.set_home(trajectory, engine.engine_id)
        self.state.count_inflight(trajectory, engine.engine_id)
        engine.placed += 1
        trajectory.advance(TrajectoryEvent.PLACED, at)
        return StartStep(
            trajectory_id=trajectory.trajectory_id,
            step_index=step.step_index,
            attempt=step.attempt,
            engine_id=engine.engine_id,
            priority=priority,
            order=order,
            source_engine_id=source,
        )

    def _preempt_for(self, trajectory: Trajectory, engine: Engine) -> list[Command]:
        """Stop a running step when this one has to wait for a slot and outranks it clearly enough."""
        preemption = self.strategies.preemption
        if preemption is None or len(engine.inflight) <= engine.spec.slots:
            return []
        if len(engine.inflight) - engine.stopping <= engine.spec.slots:
            return []  # a slot is about to be free, and nobody else waits for it
        most = self.limits.max_preemptions
        running = [other for other in engine.running.values() if other.preemptions < most]
        victim = preemption.victim(trajectory, running) if running else None
        if victim is None:
            return []
        guards.check_victim(trajectory, victim, running)
        assert guards.can_stop(victim, most), victim.trajectory_id
        self.state.mark_stopping(victim, engine)
        return self._abort_open_step(victim, f"preempted for {trajectory.trajectory_id}")

    def _place_waiting(self, at: float) -> list[Command]:
        if not self.state.ready_engines:
            return []
        commands: list[Command] = []
        for trajectory_id in list(self.state.waiting_steps):
            commands += self._place(self.state.trajectories[trajectory_id], at)
        return commands

    def _give_up_step(self, trajectory: Trajectory, at: float, cause: str) -> list[Command]:
        step = trajectory.step
        assert step is not None, trajectory.trajectory_id
        # The driver answers with TrajectoryEnded; until then the step neither waits nor runs.
        self.state.waiting_steps.pop(trajectory.trajectory_id, None)
        trajectory.advance(TrajectoryEvent.PLACED, at)
        trajectory.advance(TrajectoryEvent.STEP_ENDED, at)
        return [GiveUpStep(trajectory.trajectory_id, step.step_index, step.attempt, cause)]

    def _current(
        self, event: ev.StepStarted | ev.StepFinished | ev.StepFailed
    ) -> tuple[Trajectory, Engine] | None:
        """The records an event of a step speaks of, or None when it is superseded."""
        trajectory = self.state.trajectories.get(event.trajectory_id)
        if trajectory is None or trajectory.counted_on != event.engine_id:
            return None
        step = trajectory.step
        if step is None or (step.step_index, step.attempt) != (event.step_index, event.attempt):
            return None
        return trajectory, self.state.engines[event.engine_id]

    def _step_started(self, event: ev.StepStarted) -> list[Command]:
        current = self._current(event)
        if current is None or not current[0].advance(TrajectoryEvent.STARTED, event.at):
            return self.state.late()
        self.state.count_running(*current)
        return []

    def _step_finished(self, event: ev.StepFinished) -> list[Command]:
        current = self._current(event)
        if current is None:
            return self.state.late()
        trajectory, engine = current
        if engine.state is not EngineState.LOST:
            trajectory.advance_kv(KvEvent.WRITTEN)
        self._end_step(trajectory, engine, event.at)
        return self._after_answer(trajectory, event)

    def _after_answer(self, trajectory: Trajectory, event: ev.StepFinished) -> list[Command]:
        # An admission by KV pressure knows more after every answer; most have nobody waiting.
        commands = self._count_answer(trajectory, event)
        return [*commands, *self._place_waiting(event.at), *self._admit(event.at)]

    def _count_answer(self, trajectory: Trajectory, event: ev.StepFinished) -> list[Command]:
        self.state.set_context(trajectory, trajectory.context_tokens + event.new_tokens)
        self.state.sampled_tokens += event.new_tokens
        trajectory.policy_version = event.policy_version
        whole = event.finish_reason != "abort"
        trajectory.take_tokens(event.new_tokens, whole)
        return self._predict(trajectory) if whole else []

    def _predict(self, trajectory: Trajectory) -> list[Command]:
        """Ask for a prediction beside whatever the trajectory does next."""
        if self.strategies.predictor is None:
            return []
        return [PredictRemaining(trajectory.trajectory_id)]

    def _prediction_made(self, event: ev.PredictionMade) -> list[Command]:
        trajectory = self.state.trajectories.get(event.trajectory_id)
        if trajectory is None or trajectory.state is TrajectoryState.ENDED:
            return self.state.late()
        if event.steps_finished != trajectory.steps_finished:
            return self.state.late()
        self.state.observed_per_token = event.observed_per_token
        self.state.take_prediction(
            trajectory,
            event.remaining_tokens,
            event.remaining_tokens_q90,
            event.remaining_s,
            event.remaining_s_q90,
        )
        if trajectory.state is TrajectoryState.SUBMITTED:
            self._rank(trajectory)
            return self._admit(event.at)
        return self.moves.consider(trajectory)

    def _move_ended(self, event: ev.MoveEnded) -> list[Command]:
        commands = self.moves.ended(event)
        if event.trajectory_id in self.state.waiting_steps:
            commands += self._place(self.state.trajectories[event.trajectory_id], event.at)
        return commands

    def _step_delivered(self, event: ev.StepDelivered) -> list[Command]:
        trajectory = self.state.trajectories.get(event.trajectory_id)
        step = None if trajectory is None else trajectory.step
        if trajectory is None or step is None or trajectory.state not in STEP_STATES:
            return self.state.late()
        if (step.step_index, step.attempt) != (event.step_index, event.attempt):
            return self.state.late()
        if trajectory.counted_on == event.engine_id:
            return self._step_finished(event)
        # The engine that answered was lost: the step waits again, or runs a second time for nobody.
        commands = self._abort_open_step(trajectory, "answered before")
        if trajectory.counted_on is None:
            self.state.waiting_steps.pop(trajectory.trajectory_id, None)
            trajectory.advance(TrajectoryEvent.PLACED, event.at)
            trajectory.advance(TrajectoryEvent.STEP_ENDED, event.at)
        else:
            self._end_step(trajectory, self.state.engines[trajectory.counted_on], event.at)
        return [*commands, *self._after_answer(trajectory, event)]

    def _step_failed(self, event: ev.StepFailed) -> list[Command]:
        current = self._current(event)
        if current is None:
            return self.state.late()
        self._end_step(*current, event.at)
        return self._place_waiting(event.at)

    def _end_step(self, trajectory: Trajectory, engine: Engine, at: float) -> None:
        was_generating = trajectory.state is TrajectoryState.GENERATING
        self.state.uncount_inflight(trajectory, was_generating)
        trajectory.advance(TrajectoryEvent.STEP_ENDED, at)
        trajectory.rested_at = at
        if engine.state is EngineState.LOST:
            self.state.set_home(trajectory, None)

    # -- engines -----------------------------------------------------------------------------------

    def _engine_joined(self, event: ev.EngineJoined) -> list[Command]:
        spec = event.engine
        if spec.engine_id in self.state.engines:
            raise KeyError(f"engine {spec.engine_id} joined before; a restart needs a new id")
        self.state.engines[spec.engine_id] = Engine(spec=spec, number=self.state.next_number())
        self.state.refresh_ready()
        # It gets its share of those that were planned without it and have not begun.
        self._unplanned = {**self._unplaced, **self._unplanned}
        self._unplaced.clear()
        return [*self._place_waiting(event.at), *self._admit(event.at)]

    def _engine_draining(self, event: ev.EngineDraining) -> list[Command]:
        engine = self.state.engines[event.engine_id]
        if not engine.advance(EngineEvent.DRAIN_ORDERED):
            return self.state.late()
        self.state.refresh_ready()
        self.moves.forget_target(engine.engine_id)
        return []

    def _engine_lost(self, event: ev.EngineLost) -> list[Command]:
        engine = self.state.engines.get(event.engine_id)
        if engine is None:
            return self.state.late()
        if engine.advance(EngineEvent.LOST):
            self.state.refresh_ready()
        elif not (event.stranded and engine.inflight):  # else: now its worker died too
            return self.state.late()
        if event.stranded:
            self._strand(engine, event.at)
        for trajectory_id in list(engine.residents):
            self._evict(self.state.trajectories[trajectory_id], engine.engine_id)
        moves = self.moves.engine_lost(engine.engine_id, event.at)
        return [*moves, *self._give_up_hopeless(event.at), *self._place_waiting(event.at)]

    def _evict(self, trajectory: Trajectory, engine_id: EngineId) -> None:
        """The engine is gone: its KV is lost, and a trajectory with no step there has no home."""
        trajectory.advance_kv(KvEvent.ENGINE_LOST)
        if trajectory.counted_on != engine_id:
            self.state.set_home(trajectory, None)

    def _strand(self, engine: Engine, at: float) -> None:
        stranded = list(engine.inflight)
        for trajectory_id in stranded:
            trajectory = self.state.trajectories[trajectory_id]
            was_generating = trajectory.state is TrajectoryState.GENERATING
            self.state.uncount_inflight(trajectory, was_generating)
            trajectory.advance(TrajectoryEvent.STRANDED, at)
            # Only those that held a slot can have killed the worker; the queued ones are innocent.
            trajectory.losses += was_generating
        # They had been placed before those that wait were asked for: they come first.
        self.state.waiting_steps = {**dict.fromkeys(stranded), **self.state.waiting_steps}

    def _give_up_hopeless(self, at: float) -> list[Command]:
        commands: list[Command] = []
        for trajectory_id in list(self.state.waiting_steps):
            trajectory = self.state.trajectories[trajectory_id]
            if trajectory.losses > self.limits.max_losses:
                cause = f"its worker died {trajectory.losses} times while it was generating"
                commands += self._give_up_step(trajectory, at, cause)
        return commands
