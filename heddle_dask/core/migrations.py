"""Moves of contexts between engines: proposed by a strategy, started when source and target are free, ended once.

No two running moves share an engine; the strategy chooses which starts first (Heddle, section 5.3: the longest
trajectory's). If the next step is requested before the move has started, the move is cancelled; if it has started,
the step waits for its end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from heddle_dask.core import events as ev
from heddle_dask.core import guards
from heddle_dask.core.commands import Command, DropContext, MoveContext
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import EngineId, StepId, TrajectoryId
from heddle_dask.core.run_strategies import RunStrategies, StrategyTable
from heddle_dask.core.state import State
from heddle_dask.core.transitions import EngineState, KvEvent, KvState, TrajectoryState
from heddle_dask.core.view import Move, MoveRequest


@dataclass(slots=True)
class MoveTotals:
    """Totals over the moves of one kind.

    Attributes
    ----------
    bytes
        Bytes of copied KV cache: tokens times the target's bytes per token, if the engine reports them; 0 for
        recomputed contexts.
    exposed, exposed_s
        Number of moves that a step waited for, and the seconds of waiting.
    late
        Exposed moves that succeeded and were no longer than the tool time: started with the tool call, they would have
        been hidden.
    """

    started: int = 0
    failed: int = 0
    seconds: float = 0.0
    tokens: int = 0
    exposed: int = 0
    exposed_s: float = 0.0
    late: int = 0
    bytes: int = 0


def can_transfer(source: Engine, target: Engine) -> bool:
    """Whether a KV cache can be copied between these engines."""
    ends = (source.spec, target.spec)
    return all(end.kv_transfer for end in ends) and ends[0].tp_degree == ends[1].tp_degree


class Migrations:
    """Pending and running moves."""

    def __init__(self, state: State, runs: StrategyTable) -> None:
        self.state = state
        self.runs = runs
        self.totals: dict[str, MoveTotals] = {}
        self._pending: dict[TrajectoryId, MoveRequest] = {}
        self._running: dict[TrajectoryId, MoveRequest] = {}
        # Indexes: pending moves by each of their two engines; pending moves with two free engines; engines in a running
        # move.
        self._at: dict[EngineId, dict[EngineId, dict[TrajectoryId, MoveRequest]]] = {}
        self._free: dict[TrajectoryId, MoveRequest] = {}
        self._busy: dict[EngineId, TrajectoryId] = {}
        # They are about to change their weights: no move begins there.
        self._closed: dict[EngineId, None] = {}
        # The step for which a trajectory's KV cache was handed over last: once for each request.
        self._handed: dict[TrajectoryId, StepId] = {}

    @property
    def running(self) -> int:
        return len(self._running)

    def consider(self, trajectory: Trajectory) -> list[Command]:
        """Ask the strategy for a move of this trajectory, and start the moves that can start."""
        run = self.runs.of(trajectory)
        if run.strategies.migration is None or not self._may_move(trajectory):
            return []
        move = run.strategies.migration.propose(run.view, trajectory)
        self._drop(trajectory.trajectory_id)
        if move is not None:
            guards.check_move(self.state, trajectory, move)
            if self._affinity_allows(run, trajectory, move) and (
                move.may_wait or not self._is_engaged(trajectory, move)
            ):
                self._add(self._request(trajectory, move))
        return self._start()

    def _is_engaged(self, trajectory: Trajectory, move: Move) -> bool:
        """Whether another move occupies one of its engines now, or it is about to change its weights."""
        ends = (trajectory.home, move.target_engine_id)
        return not all(end is None or self._is_free(end) for end in ends)

    def _affinity_allows(self, run: RunStrategies, trajectory: Trajectory, move: Move) -> bool:
        affinity = run.strategies.affinity
        return affinity is None or affinity.may_move(trajectory, self.state.engines[move.target_engine_id])

    def _add(self, request: MoveRequest) -> None:
        name = request.trajectory_id
        self._pending[name] = request
        for end, other in ((request.source, request.target), (request.target, request.source)):
            self._at.setdefault(end, {}).setdefault(other, {})[name] = request
        if self._is_free(request.source) and self._is_free(request.target):
            self._free[name] = request

    def _is_free(self, engine_id: EngineId) -> bool:
        return engine_id not in self._busy and engine_id not in self._closed

    def _drop(self, name: TrajectoryId) -> None:
        """Drop the pending move of a trajectory, if there is one."""
        request = self._pending.pop(name, None)
        if request is None:
            return
        self._free.pop(name, None)
        for end, other in ((request.source, request.target), (request.target, request.source)):
            between = self._at[end][other]
            del between[name]
            if not between:
                del self._at[end][other]

    def _occupy(self, move: MoveRequest) -> None:
        ends = (move.source, move.target)
        for end in ends:
            self._busy[end] = move.trajectory_id
        self._hold_back(*ends)

    def _hold_back(self, *ends: EngineId) -> None:
        gone = [name for name, other in self._free.items() if other.source in ends or other.target in ends]
        for name in gone:
            del self._free[name]

    def _release(self, move: MoveRequest) -> None:
        for end in (move.source, move.target):
            del self._busy[end]
        for end in (move.source, move.target):
            self._let_go(end)

    def _let_go(self, end: EngineId) -> None:
        if not self._is_free(end):
            return
        for other, between in self._at.get(end, {}).items():
            if self._is_free(other):
                self._free.update(between)

    def close(self, engine_id: EngineId) -> None:
        """Let no move begin from or to this engine; pending ones wait, and a running one goes on."""
        self._closed[engine_id] = None
        self._hold_back(engine_id)

    def open(self, engine_id: EngineId) -> list[Command]:
        """The inverse of `close`: moves that waited may begin."""
        if engine_id not in self._closed:
            return []
        del self._closed[engine_id]
        self._let_go(engine_id)
        return self._start()

    def _may_move(self, trajectory: Trajectory) -> bool:
        idle = trajectory.state in (TrajectoryState.THINKING, TrajectoryState.ACTING)
        return idle and trajectory.kv is KvState.RESIDENT and trajectory.home is not None

    def step_requested(self, trajectory: Trajectory) -> None:
        """The next step is requested: cancel the trajectory's pending move."""
        self._drop(trajectory.trajectory_id)

    def trajectory_ended(self, trajectory: Trajectory) -> None:
        """Cancel the pending move of an ended trajectory; a running move occupies its engines until it reports."""
        self._drop(trajectory.trajectory_id)
        self._handed.pop(trajectory.trajectory_id, None)

    def _request(self, trajectory: Trajectory, move: Move) -> MoveRequest:
        assert trajectory.home is not None, trajectory.trajectory_id
        return MoveRequest(
            trajectory_id=trajectory.trajectory_id,
            source=trajectory.home,
            target=move.target_engine_id,
            kind=move.kind,
            length_tokens=trajectory.remaining_tokens() or 0.0,
            order=self.state.next_number(),
        )

    def waits_for_kv(self, trajectory: Trajectory) -> bool:
        """Whether its step waits for a hand-over that has not started."""
        pending = self._pending.get(trajectory.trajectory_id)
        return pending is not None and pending.for_step

    def can_hand_over(self, trajectory: Trajectory, target: Engine) -> bool:
        """Whether its KV cache is on another engine, from which it can be transferred to this one.

        Once for each request of a step: after a failure the target computes the context.
        """
        if trajectory.home in (None, target.engine_id) or trajectory.kv is not KvState.RESIDENT:
            return False
        step = trajectory.step
        assert step is not None and trajectory.home is not None, trajectory.trajectory_id
        tried = self._handed.get(trajectory.trajectory_id) == step.step_id
        usable = guards.has_kv_of(self.state, trajectory, target.engine_id)
        return not tried and usable and can_transfer(self.state.engines[trajectory.home], target)

    def hand_over(self, trajectory: Trajectory, target: Engine) -> list[Command]:
        """Transfer its KV cache to the engine of its waiting step, as soon as both engines are free."""
        assert trajectory.step is not None, trajectory.trajectory_id
        self._handed[trajectory.trajectory_id] = trajectory.step.step_id
        request = self._request(trajectory, Move(target.engine_id, "transfer"))
        self._add(replace(request, for_step=True))
        return self._start()

    def leave(self, trajectory: Trajectory) -> list[Command]:
        """Move a trajectory at rest away from its engine, which drains, to the engine with the least load.

        It stays when no ready engine takes its context. It is not asked of the strategy, and precedes its moves.
        """
        assert trajectory.home is not None, trajectory.trajectory_id
        self._drop(trajectory.trajectory_id)
        source = self.state.engines[trajectory.home]
        fitting = [e for e in self.state.ready_engines if trajectory.context_tokens < e.spec.max_context_tokens]
        if fitting:
            target = min(fitting, key=lambda engine: (self._load(engine), engine.number))
            kind = "transfer" if can_transfer(source, target) else "recompute"
            self._add(self._request(trajectory, Move(target.engine_id, kind)))
        return self._start()

    def _load(self, engine: Engine) -> float:
        """Share of its KV memory that residents and those on their way fill; tokens where its size is unknown."""
        coming = sum(
            self.state.trajectories[name].context_tokens
            for name, move in self._touching(engine.engine_id)
            if move.target == engine.engine_id
        )
        return (engine.resident_tokens + coming) / (engine.spec.kv_capacity_tokens or 1)

    def _start(self) -> list[Command]:
        """Start moves: away from draining engines, longest trajectories first; those that steps wait for; others.

        They are among the pending moves with two free engines, which are few.
        """
        commands: list[Command] = []
        if self.state.draining:
            leaving = [move for move in self._free.values() if move.source in self.state.draining]
            for move in sorted(leaving, key=lambda move: (-move.length_tokens, move.order)):
                if move.trajectory_id in self._free:
                    commands.append(self._begin(move))
        for move in [move for move in self._free.values() if move.for_step]:
            if move.trajectory_id in self._free:
                commands.append(self._begin(move))
        for run in self.runs.in_turn():
            commands += self._start_of(run)
        return commands

    def _start_of(self, run: RunStrategies) -> list[Command]:
        """Start the moves that the strategy of one run chooses among its own."""
        if not self._free or run.strategies.migration is None:
            return []
        known = self.state.trajectories
        free = [m for m in self._free.values() if known[m.trajectory_id].spec.run_id == run.run_id]
        if not free:
            return []
        running = list(self._running.values())
        return [self._begin(move) for move in run.strategies.migration.choose(free, running)]

    def _begin(self, move: MoveRequest) -> Command:
        name = move.trajectory_id
        trajectory = self.state.trajectories[name]
        if move.kind == "transfer" and not guards.has_kv_of(self.state, trajectory, move.target):
            move = replace(move, kind="recompute")
        guards.check_transfer(move, self._running.values())
        guards.check_kv_version(self.state, trajectory, move)
        self._drop(name)
        self._occupy(move)
        trajectory.advance_kv(KvEvent.MOVE_STARTED)
        trajectory.moves += 1
        self._running[name] = move
        self._totals(move.kind).started += 1
        return MoveContext(name, move.source, move.target, move.kind)

    def is_busy(self, engine_id: EngineId) -> bool:
        return engine_id in self._busy

    def _totals(self, kind: str) -> MoveTotals:
        return self.totals.setdefault(kind, MoveTotals())

    def ended(self, event: ev.MoveEnded) -> list[Command]:
        """A move has ended; the caller places the step that waited for it.

        The unneeded copy of the context is dropped: at the source after a success, at the target if the move came too
        late.
        """
        running = self._running.get(event.trajectory_id)
        current = running is not None and running.target == event.target_engine_id
        if running is None or not current or event.source_engine_id not in (None, running.source):
            return [*self.state.count_stale(), *self._drop_unneeded(event)]
        del self._running[event.trajectory_id]
        self._release(running)
        totals = self._totals(running.kind)
        totals.seconds += event.seconds
        totals.tokens += event.tokens
        totals.failed += not event.ok
        totals.bytes += self._kv_bytes(running, event.tokens)
        trajectory = self.state.trajectories.get(event.trajectory_id)
        if trajectory is not None and trajectory.state is TrajectoryState.WAITING:
            totals.exposed += 1
            totals.exposed_s += event.at - trajectory.requested_at
            totals.late += event.ok and event.seconds <= trajectory.resting_tools_s
        arrived = left_behind = False
        if trajectory is not None and trajectory.kv is KvState.MOVING:
            engine = self.state.engines.get(running.target)
            arrived = event.ok and engine is not None and engine.state is EngineState.READY
            trajectory.advance_kv(KvEvent.MOVE_ENDED if arrived else KvEvent.MOVE_FAILED)
            if arrived and engine is not None:
                self.state.set_home(trajectory, running.target)
                trajectory.kept_on = running.target
                if running.kind == "recompute":
                    trajectory.kv_version = engine.version
            elif running.source in self.state.draining:
                # It leaves without: a second try could fail as well, and the engine waits.
                trajectory.advance_kv(KvEvent.DROPPED)
                self.state.set_home(trajectory, None)
                left_behind = True
        gone = arrived or left_behind
        left: list[Command] = [DropContext(event.trajectory_id, running.source)] if gone else []
        if not arrived:
            left += self._drop_unneeded(event)
        return [*left, *self._start()]

    def _drop_unneeded(self, event: ev.MoveEnded) -> list[Command]:
        """Drop a context that arrived at an engine that is neither the home nor the target of a running move."""
        trajectory = self.state.trajectories.get(event.trajectory_id)
        running = self._running.get(event.trajectory_id)
        needed = (trajectory and trajectory.home, running and running.target)
        if not event.ok or event.target_engine_id in needed:
            return []
        return [DropContext(event.trajectory_id, event.target_engine_id)]

    def _kv_bytes(self, move: MoveRequest, tokens: int) -> int:
        target = self.state.engines.get(move.target)
        if move.kind != "transfer" or target is None:
            return 0
        return round(tokens * target.spec.kv_bytes_per_token)

    def forget_target(self, engine_id: EngineId) -> None:
        """Cancel all pending moves to this engine."""
        for name, waiting in self._touching(engine_id):
            if waiting.target == engine_id:
                self._drop(name)

    def _touching(self, engine_id: EngineId) -> list[tuple[TrajectoryId, MoveRequest]]:
        return [item for between in self._at.get(engine_id, {}).values() for item in between.items()]

    def engine_lost(self, engine_id: EngineId, at: float) -> list[Command]:
        """End the moves of a lost engine, since they may never report."""
        for name, _ in self._touching(engine_id):
            self._drop(name)
        self._at.pop(engine_id, None)
        commands: list[Command] = []
        for name, move in list(self._running.items()):
            if engine_id in (move.source, move.target):
                lost = ev.MoveEnded(at, name, move.target, False, move.kind, 0.0, cause="engine lost")
                commands += self.ended(lost)
        return commands
