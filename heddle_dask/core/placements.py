"""Placements: the engine of each waiting step, preemptions on that engine, steps that are held back or given up.

Strategies choose the engine, the priority and the victim of a preemption; guards refuse invalid choices. A step that no
engine can take is given up at once; a step that the placement declines waits for the next call.

A single run's steps are sent to their engine's worker at once and wait there. Several runs would fill that queue in the
order in which they arrive, and their priorities cannot be compared. So a placed step of a run that shares the engines
is held here, an engine gets as many steps as it has slots and a few more that bridge the way of the next one, and each
place that becomes free goes to the run whose turn it is (`core.fair_share`), there to the step of the highest priority.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heddle_dask.core import guards
from heddle_dask.core.commands import PREEMPTED_FOR, RECALLED, Command, GiveUpStep, StartStep
from heddle_dask.core.engine_list import engine_among
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.fair_share import KV, SLOTS
from heddle_dask.core.ids import EngineId, RunId, TrajectoryId
from heddle_dask.core.migrations import Migrations
from heddle_dask.core.nouns import NORMAL, StepRequest
from heddle_dask.core.optional_parts import offers
from heddle_dask.core.run_strategies import RunStrategies, StrategyTable
from heddle_dask.core.state import State
from heddle_dask.core.transitions import TrajectoryEvent, TrajectoryState, WeightsState
from heddle_dask.core.view import PlansBatches, Route

_AHEAD_SHARE = 1 / 8


def most_sent(engine: Engine) -> int:
    """Steps that an engine is sent at the same time while runs share it."""
    return engine.spec.slots + max(1, int(_AHEAD_SHARE * engine.spec.slots))


class HeldSteps:
    """The controller's lines of steps that are placed and not sent."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._lines: dict[EngineId, dict[RunId, dict[TrajectoryId, StartStep]]] = {}

    def hold(self, trajectory: Trajectory, start: StartStep) -> None:
        run_id = trajectory.spec.run_id
        run = self.state.runs[run_id]
        if run.held == 0:
            waiting = [name for name, run in self.state.runs.items() if run.held]
            self.state.fair.begins_to_wait(run_id, waiting)
        run.held += 1
        trajectory.held = True
        engine = self.state.engines[start.engine_id]
        engine.held += 1
        engine.held_of[run_id] = engine.held_of.get(run_id, 0) + 1
        line = self._lines.setdefault(start.engine_id, {}).setdefault(run_id, {})
        line[trajectory.trajectory_id] = start

    def take_out(self, trajectory: Trajectory) -> StartStep | None:
        """A held step is sent, waits for another engine, or is not needed any more; None if it is not held."""
        if not trajectory.held or trajectory.counted_on is None:
            return None
        trajectory.held = False
        run_id, engine = trajectory.spec.run_id, self.state.engines[trajectory.counted_on]
        engine.held -= 1
        engine.held_of[run_id] -= 1
        self.state.runs[run_id].held -= 1
        lines = self._lines[engine.engine_id]
        start = lines[run_id].pop(trajectory.trajectory_id)
        if not lines[run_id]:
            del lines[run_id]
        if not lines:
            del self._lines[engine.engine_id]
        return start

    def wait_again(self, engine: Engine, at: float) -> bool:
        """Have the steps that are held for this engine wait for another one; whether there was any."""
        lines = self._lines.get(engine.engine_id, {})
        names = [name for line in lines.values() for name in line]
        for name in names:
            trajectory = self.state.trajectories[name]
            self.take_out(trajectory)
            self.state.uncount_inflight(trajectory, False)
            trajectory.advance(TrajectoryEvent.STRANDED, at)
        self.state.waiting_steps = {**dict.fromkeys(names), **self.state.waiting_steps}
        return bool(names)

    def send(self, at: float) -> list[Command]:
        """Send held steps to engines with a free place; all of them, once only one run is left."""
        commands: list[Command] = []
        if self._lines and self.state.is_shared:
            self._settle(at)
        for engine_id in list(self._lines):
            engine = self.state.engines[engine_id]
            while (lines := self._lines.get(engine_id)) and self._has_room(engine):
                (run_id, *_) = self.state.fair.in_turn(lines) if self.state.is_shared else list(lines)
                first = max(lines[run_id], key=lambda name: self.state.trajectories[name].priority)
                commands.append(self._send(self.state.trajectories[first], at))
        return commands

    def _has_room(self, engine: Engine) -> bool:
        return not self.state.is_shared or len(engine.inflight) - engine.held < most_sent(engine)

    def _send(self, trajectory: Trajectory, at: float) -> StartStep:
        start = self.take_out(trajectory)
        assert start is not None, trajectory.trajectory_id
        if not self.state.is_shared:
            return start
        self.charge(trajectory, at)
        # The order among runs is decided; at the worker and in the engine the first that is sent runs first.
        return replace(start, priority=NORMAL, order=self.state.next_number())

    def charge(self, trajectory: Trajectory, at: float) -> None:
        """Charge the run for a step that is sent, while there are several."""
        if self.state.is_shared:
            slots = sum(engine.spec.slots for engine in self.state.ready_engines)
            shares = {SLOTS: 1.0 / max(1, slots)}
            self.state.fair.start(trajectory.trajectory_id, trajectory.spec.run_id, SLOTS, shares, at)

    def _settle(self, at: float) -> None:
        """Have every run pay for the KV memory that it holds."""
        capacity = sum(engine.spec.kv_capacity_tokens for engine in self.state.ready_engines)
        if capacity:
            for run_id, run in self.state.runs.items():
                self.state.fair.holds(run_id, {KV: run.kv_tokens / capacity}, at)

    def recall(self) -> list[Command]:
        """Call back what waits at workers, beyond what an engine is sent while runs share it: another run joins."""
        commands: list[Command] = []
        for engine in self.state.ready_engines:
            queued = [self.state.trajectories[name] for name in engine.inflight]
            queued = [t for t in queued if t.state is TrajectoryState.QUEUED and not (t.held or t.leaving)]
            surplus = len(engine.inflight) - engine.held - most_sent(engine)
            for trajectory in sorted(queued, key=lambda t: t.priority)[: max(0, surplus)]:
                trajectory.leaving = True
                commands += trajectory.abort_step(RECALLED)
        return commands


class Placements:
    """Steps that wait for an engine; the controller decides when to place them."""

    def __init__(self, state: State, runs: StrategyTable, held: HeldSteps, moves: Migrations) -> None:
        self.state = state
        self.runs = runs
        self.held = held
        self.moves = moves

    def submitted(self, trajectory: Trajectory) -> None:
        """Include a submitted trajectory in the next plan of a placement that plans batches."""
        self.runs.of(trajectory).unplanned[trajectory.trajectory_id] = None

    def trajectory_ended(self, trajectory: Trajectory) -> None:
        """Drop the waiting step of an ended trajectory."""
        self.state.waiting_steps.pop(trajectory.trajectory_id, None)

    def engine_joined(self) -> None:
        """Plan the trajectories without a placed step again, so that a new engine gets its share."""
        for run in self.runs:
            run.unplanned = {**run.unplaced, **run.unplanned}
            run.unplaced.clear()

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
        held_back = trajectory.cancelled or self.moves.waits_for_kv(trajectory)
        if not ready or held_back or not guards.can_dispatch(trajectory):
            return []
        candidates: Sequence[Engine] = ready
        if step.context_tokens >= self.state.least_max_context:
            candidates = [engine for engine in ready if guards.can_take(engine, step)]
        if not candidates:
            longest = max(engine.spec.max_context_tokens for engine in ready)
            return self.give_up(trajectory, at, f"context of {step.context_tokens} tokens, engines take {longest}")
        candidates = self.new_enough(trajectory, candidates)
        if not candidates:
            return []
        run = self.runs.of(trajectory)
        if trajectory.trajectory_id in run.unplanned:
            self._plan_batch(run, ready)
        route = self._route(run, trajectory, step, candidates)
        choice = self._choose(run, trajectory, step, route.engines)
        if choice is None:
            return []
        if route.with_kv and self.moves.can_hand_over(trajectory, choice):
            return self.moves.hand_over(trajectory, choice)
        start = self._dispatch(trajectory, choice, at, route.prefill_only)
        stops = self._preempt_for(trajectory, choice)
        if stops:
            self.held.charge(trajectory, at)
            return [replace(start, bypass_queue=True), *stops]
        if self.state.is_shared:
            self.held.hold(trajectory, start)
            return []
        return [start]

    def new_enough(self, trajectory: Trajectory, candidates: Sequence[Engine]) -> Sequence[Engine]:
        """Those whose weights may sample the first token of a trajectory; any of them where it has begun."""
        ledger = self.state.run_of(trajectory).ledger
        if ledger is None or trajectory.has_begun:
            return candidates
        group_id = trajectory.spec.group_id
        able = [engine for engine in candidates if ledger.may_begin(group_id, engine.version)]
        if len(able) == len(candidates) or not able:
            return able
        # The first engine with newer weights must not get all that waits for them: it takes only as many as it would
        # beside those that install them now.
        soon = [engine for engine in candidates if engine not in able and self._installs_soon(engine)]
        least = min((len(engine.residents) for engine in soon), default=len(self.state.trajectories))
        return [engine for engine in able if len(engine.residents) <= least]

    def _installs_soon(self, engine: Engine) -> bool:
        """Whether it installs the newest weights now, or may do so next."""
        weights = engine.weights
        return weights.state is WeightsState.INSTALLING or self.state.weights.may_install(weights)

    def _route(
        self, run: RunStrategies, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]
    ) -> Route:
        affinity = run.strategies.affinity
        if affinity is None:
            return Route(candidates)
        route = affinity.route(trajectory, step, candidates)
        guards.check_route(trajectory, route, candidates)
        return route

    def _plan_batch(self, run: RunStrategies, engines: Sequence[Engine]) -> None:
        """Let the placement plan the trajectories that wait for a plan; other placements ignore batches."""
        if offers(run.strategies.placement, PlansBatches):
            batch = [self.state.trajectories[name] for name in run.unplanned]
            homeless = [t for t in batch if t.home is None]
            run.strategies.placement.plan(homeless, engines)
            run.unplaced.update((t.trajectory_id, None) for t in homeless)
        run.unplanned.clear()

    def _choose(
        self, run: RunStrategies, trajectory: Trajectory, step: StepRequest, engines: Sequence[Engine]
    ) -> Engine | None:
        """The engine that has taken the step, else that of the placement, unless an idle one takes it from its home."""
        taker = engine_among(engines, trajectory.bound_for)
        self.state.unbind(trajectory)
        if taker is not None:
            return taker
        choice = run.strategies.placement.choose_engine(trajectory, step, engines)
        if choice is None:
            return None
        guards.check_choice(trajectory, step, choice, engines)
        if self.state.newcomers and choice.engine_id == trajectory.home:
            return self._newcomer(run, trajectory, choice, engines) or choice
        return choice

    def _newcomer(
        self, run: RunStrategies, trajectory: Trajectory, home: Engine, engines: Sequence[Engine]
    ) -> Engine | None:
        """An engine that takes the step because it joined late, and has less than its share of the trajectories."""
        self.state.settle_newcomers()
        stealing = run.strategies.stealing
        for engine_id in self.state.newcomers if stealing is not None else ():
            engine = engine_among(engines, engine_id)
            if engine is None or engine is home:
                continue
            has_slot = len(engine.inflight) + len(engine.taking) < engine.spec.slots
            if stealing is not None and has_slot and stealing.prefers(trajectory, home, engine):
                return engine
        return None

    def _dispatch(self, trajectory: Trajectory, engine: Engine, at: float, prefill_only: bool) -> StartStep:
        step = trajectory.step
        assert step is not None, trajectory.trajectory_id
        order = self.state.next_number()
        run = self.runs.of(trajectory)
        priority = run.strategies.scheduling.priority(run.view, trajectory, step, order)
        trajectory.priority = priority
        source = trajectory.home
        self.state.waiting_steps.pop(trajectory.trajectory_id, None)
        run.unplaced.pop(trajectory.trajectory_id, None)
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
            prefill_only=prefill_only,
        )

    def _preempt_for(self, trajectory: Trajectory, engine: Engine) -> list[Command]:
        """Preempt a running step of its run if this one has to wait for a slot and the strategy names a victim."""
        run = self.runs.of(trajectory)
        preemption, sent = run.strategies.preemption, len(engine.inflight) - engine.held
        if preemption is None or sent <= engine.spec.slots:
            return []
        if sent - engine.stopping <= engine.spec.slots:
            return []  # a slot is about to be free, and no other step waits for it
        most = run.retries.max_preemptions
        running = [other for other in engine.running.values() if other.preemptions < most]
        if self.state.is_shared:
            running = [other for other in running if other.spec.run_id == run.run_id]
        victim = preemption.victim(trajectory, running) if running else None
        if victim is None:
            return []
        guards.check_victim(trajectory, victim, running, most)
        self.state.mark_stopping(victim, engine)
        return victim.abort_step(f"{PREEMPTED_FOR}{trajectory.trajectory_id}")

    def give_up(self, trajectory: Trajectory, at: float, cause: str) -> list[Command]:
        step = trajectory.step
        assert step is not None, trajectory.trajectory_id
        # The driver will send TrajectoryEnded; until then the step neither waits nor runs.
        self.withdraw(trajectory, at)
        return [GiveUpStep(step.step_id, cause)]

    def withdraw(self, trajectory: Trajectory, at: float) -> None:
        self.state.waiting_steps.pop(trajectory.trajectory_id, None)
        trajectory.advance(TrajectoryEvent.PLACED, at)
        trajectory.advance(TrajectoryEvent.STEP_ENDED, at)
