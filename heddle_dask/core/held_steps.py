"""Steps that are held back while several runs share the engines, and which of them an engine gets next.

A single run's steps are sent to their engine's worker at once and wait there. Several runs would fill that queue in the
order in which they arrive, and their priorities cannot be compared. So a placed step of a run that shares the engines
is held here, an engine gets as many steps as it has slots and a few more that bridge the way of the next one, and each
place that becomes free goes to the run whose turn it is (`core.fair_share`), there to the step of the highest priority.
"""

from __future__ import annotations

from dataclasses import replace

from heddle_dask.core.commands import Command, StartStep
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.fair_share import KV, SLOTS
from heddle_dask.core.ids import EngineId, RunId, TrajectoryId
from heddle_dask.core.priority import NORMAL
from heddle_dask.core.state import State
from heddle_dask.core.transitions import TrajectoryEvent, TrajectoryState

RECALLED = "another run joins"
"""The reason of an `AbortStep` for a step that waits at a worker and goes back to be held here."""
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
        """Hold a placed step back."""
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
