"""Engines that join or are lost, and the recovery of their steps and contexts."""

from __future__ import annotations

from heddle_dask.core import events as ev
from heddle_dask.core.commands import Command
from heddle_dask.core.drains import Drains
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.held_steps import HeldSteps
from heddle_dask.core.ids import EngineId
from heddle_dask.core.migrations import Migrations
from heddle_dask.core.placements import Placements
from heddle_dask.core.run_strategies import StrategyTable
from heddle_dask.core.state import State
from heddle_dask.core.transitions import (
    EngineEvent,
    KvEvent,
    TrajectoryEvent,
    TrajectoryState,
)
from heddle_dask.core.weight_updates import WeightUpdates


class EngineMembership:
    """The controller's handler of engines."""

    def __init__(
        self,
        state: State,
        runs: StrategyTable,
        placements: Placements,
        held: HeldSteps,
        moves: Migrations,
        drains: Drains,
        updates: WeightUpdates,
    ) -> None:
        self.state = state
        self.runs = runs
        self.held = held
        self.drains = drains
        self.placements = placements
        self.moves = moves
        self.updates = updates

    def joined(self, event: ev.EngineJoined) -> list[Command]:
        """An engine joins; it takes steps unless its weights are behind."""
        spec = event.engine
        if spec.engine_id in self.state.engines:
            raise KeyError(f"engine {spec.engine_id} joined before; a restart needs a new id")
        engine = Engine(spec=spec, number=self.state.next_number())
        self.state.engines[spec.engine_id] = engine
        self.state.take_version(engine.version)
        if self.state.weights.is_behind(engine.version):
            engine.advance(EngineEvent.JOINED_BEHIND)
            return self.updates.joined(engine)
        return [*self.updates.joined(engine), *self._takes_steps(event.at)]

    def _takes_steps(self, at: float) -> list[Command]:
        """There is another engine for steps."""
        self.state.refresh_ready()
        self.placements.engine_joined()
        return [*self.placements.place_waiting(at), *self.drains.engine_joined()]

    def weights_fetched(self, event: ev.WeightsFetched) -> list[Command]:
        """An engine has weights at hand; one that can get no newer ones takes its first step with what it has."""
        commands, begins = self.updates.fetched(event)
        return commands if begins is None else [*commands, *self._takes_steps(event.at)]

    def weights_installed(self, event: ev.WeightsInstalled) -> list[Command]:
        """An engine has other weights: it takes its first step, or steps that have waited for weights."""
        commands, begins = self.updates.installed(event)
        if begins is not None:
            return [*commands, *self._takes_steps(event.at)]
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
