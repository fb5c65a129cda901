"""Engines that are deployed, join, drain or are lost, and the recovery of their steps and contexts.

A draining engine gets nothing new. What it has leaves in the order in which it can:

- a trajectory at rest moves to another engine, with its KV cache where both can transfer it, one after the other;
- a step that is queued there and has not started is stopped, comes back without tokens, and is placed elsewhere;
- a step that has started goes on. When the time is nearly over (`EngineExpiring`), it is stopped; its tokens so far
  come back, and the trajectory goes on elsewhere.

With no other engine ready everything stays where it is, until one joins or the time is nearly over. An engine with no
resident and no move, and from which no queued step will fetch its context, is drained: `ReleaseEngine`, once.
"""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core import events as ev
from heddle_dask.core import guards
from heddle_dask.core.commands import Command, DeployEngines, DropContext, PlanDegrees, ReleaseEngine
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import EngineId
from heddle_dask.core.migrations import Migrations
from heddle_dask.core.nouns import DegreeRequest, TpDegreePlan
from heddle_dask.core.placements import HeldSteps, Placements
from heddle_dask.core.run_strategies import StrategyTable
from heddle_dask.core.state import State
from heddle_dask.core.transitions import EngineEvent, EngineState, KvEvent, KvState, TrajectoryEvent, TrajectoryState
from heddle_dask.core.weight_updates import WeightUpdates


class Drains:
    """The controller's handler of engines that drain."""

    def __init__(self, state: State, moves: Migrations, held: HeldSteps) -> None:
        self.state = state
        self.held = held
        self.moves = moves

    def draining(self, event: ev.EngineDraining) -> list[Command]:
        """An engine takes no more steps, and what it has leaves it."""
        engine = self.state.engines.get(event.engine_id)
        if engine is None or not engine.advance(EngineEvent.DRAIN_ORDERED):
            return self.state.count_stale()
        engine.ends_at = event.ends_at
        self.state.draining[engine.engine_id] = None
        self.state.refresh_ready()
        self.state.release_reservations_of(engine)
        self.moves.forget_target(engine.engine_id)
        self.held.wait_again(engine, event.at)
        return self._vacate(engine)

    def engine_joined(self) -> list[Command]:
        """There is an engine to which what drains can go."""
        commands: list[Command] = []
        for engine_id in self.state.draining:
            commands += self._vacate(self.state.engines[engine_id])
        return commands

    def _vacate(self, engine: Engine) -> list[Command]:
        if not self.state.ready_engines:
            return []
        commands: list[Command] = []
        for name in engine.inflight:
            trajectory = self.state.trajectories[name]
            if trajectory.state is TrajectoryState.QUEUED:
                commands += self._stop(trajectory, "its engine drains")
        for name in list(engine.residents):
            commands += self.leave(self.state.trajectories[name])
        return commands

    def _stop(self, trajectory: Trajectory, reason: str) -> list[Command]:
        """Stop a step, unless it is being stopped already."""
        if trajectory.leaving or trajectory.stopping:
            return []
        trajectory.leaving = True
        return trajectory.abort_step(reason)

    def leave(self, trajectory: Trajectory) -> list[Command]:
        """Let a trajectory at rest leave its engine if that drains; the move may have to wait for others."""
        if trajectory.home not in self.state.draining or not self._rests(trajectory):
            return []
        if trajectory.kv is KvState.RESIDENT:
            return self.moves.leave(trajectory)
        if trajectory.kv is not KvState.MOVING:
            self.state.set_home(trajectory, None)  # it has nothing there
        return []

    def _rests(self, trajectory: Trajectory) -> bool:
        return trajectory.state in (TrajectoryState.THINKING, TrajectoryState.ACTING)

    def expiring(self, event: ev.EngineExpiring) -> list[Command]:
        """The time of a draining engine is nearly over: stop its steps, and leave KV caches behind."""
        engine = self.state.engines.get(event.engine_id)
        if engine is None or engine.state is not EngineState.DRAINING or engine.expiring:
            return self.state.count_stale()
        engine.expiring = True
        commands: list[Command] = []
        for name in list(engine.residents):
            trajectory = self.state.trajectories[name]
            if trajectory.counted_on == engine.engine_id:
                commands += self._stop(trajectory, "its engine is about to end")
            elif trajectory.kv is not KvState.MOVING:
                commands += self._leave_behind(trajectory, engine)
        return commands

    def _leave_behind(self, trajectory: Trajectory, engine: Engine) -> list[Command]:
        self.moves.step_requested(trajectory)  # a move that has not started
        trajectory.advance_kv(KvEvent.DROPPED)
        self.state.set_home(trajectory, None)
        return [DropContext(trajectory.trajectory_id, engine.engine_id)]

    def release_empty(self) -> list[Command]:
        """Tell the body of every draining engine that has become empty."""
        commands: list[Command] = []
        for engine_id in list(self.state.draining):
            engine = self.state.engines[engine_id]
            feeds = engine.feeding and not engine.expiring
            if not engine.residents and not feeds and not self.moves.is_busy(engine_id):
                engine.advance(EngineEvent.EMPTIED)
                del self.state.draining[engine_id]
                commands.append(ReleaseEngine(engine_id))
        return commands


class Deployments:
    """The controller's handler of TP degrees."""

    def __init__(self, state: State) -> None:
        self.state = state

    def requested(self, event: ev.DegreesRequested) -> list[Command]:
        """Deploy the TP degrees that the user gave, or command the search of a plan."""
        request = event.request
        if request.asked:
            return self._deploy(request, TpDegreePlan(tuple(sorted(request.asked, reverse=True)), "asked"))
        self.state.degree_request = request
        return [PlanDegrees(request.request_id)]

    def planned(self, event: ev.DegreesPlanned) -> list[Command]:
        """Deploy a plan that passes the guard; the plan of a superseded request is stale."""
        request = self.state.degree_request
        if request is None or request.request_id != event.request_id:
            return self.state.count_stale()
        if event.plan is None:
            self.state.degree_request = None
            return []
        return self._deploy(request, event.plan)

    def _deploy(self, request: DegreeRequest, plan: TpDegreePlan) -> list[Command]:
        guards.check_tp_degrees(request, plan)
        self.state.degree_request = None
        self.state.tp_degree_plan = plan
        return [DeployEngines(request.request_id, plan.tp_degrees)]


@dataclass(slots=True, eq=False)
class EngineMembership:
    """The controller's handler of engines."""

    state: State
    runs: StrategyTable
    placements: Placements
    held: HeldSteps
    moves: Migrations
    drains: Drains
    updates: WeightUpdates

    def joined(self, event: ev.EngineJoined) -> list[Command]:
        """An engine joins; it takes steps unless its weights are behind."""
        spec = event.engine
        if spec.engine_id in self.state.engines:
            raise KeyError(f"engine {spec.engine_id} joined before; a restart needs a new id")
        engine = Engine(spec=spec, number=self.state.next_number(), idle_since=event.at)
        self.state.engines[spec.engine_id] = engine
        self.state.take_version(engine.version)
        if self.state.weights.is_behind(engine.version):
            engine.advance(EngineEvent.JOINED_BEHIND)
            return self.updates.joined(engine)
        return [*self.updates.joined(engine), *self._takes_steps(engine, event.at)]

    def _takes_steps(self, engine: Engine, at: float) -> list[Command]:
        self.state.newcomers[engine.engine_id] = None
        self.state.refresh_ready()
        self.state.settle_newcomers()
        self.placements.engine_joined()
        return [*self.placements.place_waiting(at), *self.drains.engine_joined()]

    def weights_fetched(self, event: ev.WeightsFetched) -> list[Command]:
        """An engine has weights at hand; one that can get no newer ones takes its first step with what it has."""
        commands, begins = self.updates.fetched(event)
        return commands if begins is None else [*commands, *self._takes_steps(begins, event.at)]

    def weights_installed(self, event: ev.WeightsInstalled) -> list[Command]:
        """An engine has other weights: it takes its first step, or steps that have waited for weights."""
        commands, begins = self.updates.installed(event)
        if begins is not None:
            return [*commands, *self._takes_steps(begins, event.at)]
        return [*commands, *self.placements.place_waiting(event.at)]

    def lost(self, event: ev.EngineLost) -> list[Command]:
        """An engine is lost; if its worker is lost too, its steps are stranded."""
        engine = self.state.engines.get(event.engine_id)
        if engine is None:
            return self.state.count_stale()
        if engine.advance(EngineEvent.LOST):
            self.state.draining.pop(engine.engine_id, None)
            self.state.refresh_ready()
            self.state.release_reservations_of(engine)
        elif not (event.stranded and engine.inflight):  # otherwise its worker is lost now as well
            return self.state.count_stale()
        self.held.wait_again(engine, event.at)
        if event.stranded:
            self._strand(engine, event.at)
        for trajectory_id in list(engine.residents):
            self._evict(self.state.trajectories[trajectory_id], engine.engine_id)
        moves = [*self.moves.engine_lost(engine.engine_id, event.at), *self.updates.leaves(engine)]
        return [*moves, *self._give_up_hopeless(event.at), *self.placements.place_waiting(event.at)]

    def _evict(self, trajectory: Trajectory, engine_id: EngineId) -> None:
        """Mark a trajectory's KV on a lost engine as lost; without a step there, it loses its home too."""
        trajectory.advance_kv(KvEvent.ENGINE_LOST)
        if trajectory.counted_on != engine_id:
            self.state.set_home(trajectory, None)

    def _strand(self, engine: Engine, at: float) -> None:
        """Make the steps that were lost with the worker wait again."""
        stranded = list(engine.inflight)
        for trajectory_id in stranded:
            trajectory = self.state.trajectories[trajectory_id]
            was_generating = trajectory.state is TrajectoryState.GENERATING
            self.state.uncount_inflight(trajectory, was_generating)
            trajectory.advance(TrajectoryEvent.STRANDED, at)
            # Only a step that held a slot can have killed the worker: queued steps count no loss.
            trajectory.losses += was_generating
        # The stranded steps were placed before the waiting ones were requested, so they go first.
        self.state.waiting_steps = {**dict.fromkeys(stranded), **self.state.waiting_steps}

    def _give_up_hopeless(self, at: float) -> list[Command]:
        commands: list[Command] = []
        for trajectory_id in list(self.state.waiting_steps):
            commands += self.give_up_if_hopeless(self.state.trajectories[trajectory_id], at)
        return commands

    def give_up_if_hopeless(self, trajectory: Trajectory, at: float) -> list[Command]:
        """Give up a waiting step with more losses than its run retries: it may kill every engine on which it runs."""
        if trajectory.losses <= self.runs.of(trajectory).retries.max_losses:
            return []
        cause = f"its engine died {trajectory.losses} times while it was generating"
        return self.placements.give_up(trajectory, at, cause)
