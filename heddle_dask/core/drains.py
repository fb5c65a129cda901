"""Engines that drain: what they hold leaves them, and the body is told when they are empty.

A draining engine gets nothing new. What it has leaves in the order in which it can:

- a trajectory at rest moves to another engine, with its KV cache where both can transfer it, one after the other;
- a step that is queued there and has not started is stopped, comes back without tokens, and is placed elsewhere;
- a step that has started goes on. When the time is nearly over (`EngineExpiring`), it is stopped; its tokens so far
  come back, and the trajectory goes on elsewhere.

With no other engine ready everything stays where it is, until one joins or the time is nearly over. An engine with no
resident and no move, and from which no queued step will fetch its context, is drained: `ReleaseEngine`, once.
"""

from __future__ import annotations

from heddle_dask.core import events as ev
from heddle_dask.core.commands import Command, DropContext, ReleaseEngine
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.held_steps import HeldSteps
from heddle_dask.core.migrations import Migrations
from heddle_dask.core.state import State
from heddle_dask.core.transitions import EngineEvent, EngineState, KvEvent, KvState, TrajectoryState


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
