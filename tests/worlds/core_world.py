"""A random world around a controller: it knows the truth, carries out commands, and checks every one.

Who draws (a seeded generator, or hypothesis) hands in `pick`. Run as a script, it plays one world per
preset and prints the journals: the same lines under every PYTHONHASHSEED.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from worlds.core_builders import (
    Stage,
    action_of,
    engine_of,
    host_of,
    move_facts,
    restless_heddle,
    step_of,
    trajectory_spec,
)

from benchmarks.opponents.fixed_units import FixedUnits
from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.entities import NO_RESOURCES
from heddle_dask.core.nouns import (
    ActionRequest,
    DurationProfile,
    EngineDescription,
    HostDescription,
    Prediction,
    StepRequest,
)
from heddle_dask.core.resources import CPUS, MEMORY, Amounts, ResourceDemand, Resources
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.core.transitions import KvState, TrajectoryState
from heddle_dask.core.view import StrategySet
from heddle_dask.strategies.actions.elastic import ElasticUnits
from heddle_dask.strategies.actions.first_come import FirstComeMinimum
from heddle_dask.strategies.presets import PRESETS, build_strategies

T = TypeVar("T")
Pick = Callable[[Sequence[T]], T]

CONTEXTS: Final = (10, 128, 200, 512)  # some as long as an engine's limit
ENGINE_SIZES: Final = (128, 512, 4096)
POOLS: Final = ("cpu", "gpu")
LARGEST_CPUS: Final = 8
LABELS: Final = ("tests", "lint", "build")
RESTLESS: Final = "restless"
WORLDS: Final = (*PRESETS, RESTLESS)


@dataclass
class Step:
    """What the world knows of a step that was asked for and has not ended."""

    request: StepRequest
    engine_id: str | None = None
    started: bool = False
    stopping: bool = False
    leaving: bool = False
    losses: int = 0
    preemptions: int = 0
    new_tokens: int = 0

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.request.step_id, self.engine_id


@dataclass
class Program:
    """A trajectory's program."""

    admitted: bool = False
    given_up: bool = False
    next_index: int = 0
    retry: Step | None = None
    step: Step | None = None
    steps_finished: int = 0
    tools_called: int = 0
    predictions_asked: int = 0


@dataclass
class Call:
    """An action that was asked for and has not reported."""

    request: ActionRequest
    number: int
    host_id: str | None = None
    resources: Resources = NO_RESOURCES
    losses: int = 0
    orphaned: bool = False


@dataclass
class World:
    """Engines, hosts and programs, and a stage that is told of them."""

    stage: Stage
    retries: RetryPolicy
    pick: Pick[Any]
    engines: dict[str, EngineDescription] = field(default_factory=dict)
    ready: dict[str, None] = field(default_factory=dict)
    dying: dict[str, None] = field(default_factory=dict)  # engine dead, its worker alive
    draining: dict[str, bool] = field(default_factory=dict)  # whether they are about to end
    leaving_hosts: dict[str, bool] = field(default_factory=dict)  # whether they were released
    hosts: dict[str, HostDescription] = field(default_factory=dict)
    seen_hosts: dict[str, dict[Resources, None]] = field(default_factory=dict)  # by pool, lost ones included
    programs: dict[str, Program] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    wakes: list[float] = field(default_factory=list)  # times that the controller asked for
    line: list[str] = field(default_factory=list)  # calls that wait for a host, as they are to start
    stale: list[tuple[Any, ...]] = field(default_factory=list)
    asked: list[tuple[str, int]] = field(default_factory=list)  # predictions: of whom, after how many steps
    moves: dict[str, cmd.MoveContext] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)  # what took part, beyond kinds of events and commands
    kv_tokens: int = 0  # of every engine
    numbers: int = 0

    # -- the orders of the controller --------------------------------------------------------------------

    def tell(self, kind: type, *fields: Any) -> None:
        """Let an event happen, carry out what follows, and compare the world with the controller."""
        commands = self.stage.feed(kind, *fields)
        for command in commands:
            self.obey(command)
        self.check()

    def obey(self, command: cmd.Command) -> None:
        match command:
            case cmd.AdmitTrajectory():
                program = self.programs[command.trajectory_id]
                assert not program.admitted
                program.admitted = True
            case cmd.StartStep():
                self._start_step(command)
            case cmd.GiveUpStep():
                self._give_up_step(command)
            case cmd.AbortStep():
                self._abort_step(command)
            case cmd.PredictRemaining():
                program = self.programs[command.trajectory_id]
                program.predictions_asked += 1
                self.asked.append((command.trajectory_id, program.steps_finished))
            case cmd.MoveContext():
                self._move_context(command)
            case cmd.DropContext():
                self._drop_context(command)
            case cmd.ReleaseEngine():
                del self.draining[command.engine_id]
                assert not self._steps_at(command.engine_id)
                assert all(record.home != command.engine_id for record in self.stage.state.trajectories.values())
                ends = [(move.source_engine_id, move.target_engine_id) for move in self.moves.values()]
                assert all(command.engine_id not in pair for pair in ends)
                self.seen["drained"] += 1
            case cmd.ReleaseHost():
                assert not self.leaving_hosts[command.host_id], "it was released before"
                assert all(call.host_id != command.host_id for call in self.calls.values())
                self.leaving_hosts[command.host_id] = True
            case cmd.RunAction():
                self._run_action(command)
            case cmd.WakeUp():
                self.wakes.append(command.at_s)
                self.seen["asked for a time"] += 1
            case cmd.GiveUpAction():
                call = self.calls.pop(command.action_id)
                assert call.host_id is None
                self.line.remove(command.action_id)
                assert not call.orphaned, "its program does not wait for it"
            case cmd.AbortAction():
                call = self.calls[command.action_id]
                assert call.host_id == command.host_id
                assert call.orphaned

    def _start_step(self, command: cmd.StartStep) -> None:
        step = self.programs[command.step_id.trajectory_id].step
        assert step is not None, "the step had ended"
        assert step.engine_id is None, "it was commanded before"
        assert step.request.step_id == command.step_id
        assert command.engine_id in self.ready
        assert step.request.context_tokens < self.engines[command.engine_id].max_context_tokens
        assert step.losses <= self.retries.max_losses
        step.engine_id = command.engine_id

    def _abort_step(self, command: cmd.AbortStep) -> None:
        identity = (command.step_id, command.engine_id)
        program = self.programs.get(command.step_id.trajectory_id)
        step = None if program is None else program.step
        if command.reason == cmd.RECALLED or command.reason.startswith(cmd.TAKEN_BY):
            assert step is not None and step.identity == identity, "it had ended"
            assert not (step.started or step.stopping or step.leaving)
            step.leaving = True
            self.seen["recalled" if command.reason == cmd.RECALLED else "taken"] += 1
            return
        if command.reason.startswith("its engine "):
            assert step is not None and step.identity == identity, "it had ended"
            assert not step.stopping and not step.leaving, "it was stopped before"
            assert step.started <= self.draining[command.engine_id], "it may go on"
            assert self.ready or self.draining[command.engine_id], "there is nowhere to go"
            step.leaving = True
            self.seen[f"stopped {'while it ran' if step.started else 'before it began'}"] += 1
            return
        if not command.reason.startswith("preempted for "):
            # Its program has ended, or has the answer; whatever the engine still says is stale.
            assert step is None
            self.stale.append((ev.StepFinished, *identity, 3, 0, "abort"))
            return
        assert step is not None and step.identity == identity, "it had ended"
        assert step.started, "it waited itself"
        assert not step.stopping, "it was stopped before"
        assert step.preemptions < self.retries.max_preemptions
        preempting = self.programs[command.reason.removeprefix("preempted for ")].step
        assert preempting is not None and preempting is not step
        assert preempting.engine_id == step.engine_id and not preempting.started
        there = [other for other in self._steps_at(command.engine_id) if not other.stopping]
        assert len(there) > self.engines[command.engine_id].slots, "a slot is free, or about to be"
        step.stopping = True
        step.preemptions += 1
        self.seen["preempted"] += 1

    def _move_context(self, command: cmd.MoveContext) -> None:
        name, ends = command.trajectory_id, {command.source_engine_id, command.target_engine_id}
        assert self.programs[name].step is None, "it is not at rest"
        assert name not in self.moves, "it moves already"
        assert len(ends) == 2 and command.target_engine_id in self.ready
        assert command.source_engine_id in self.engines and command.source_engine_id not in self.dying
        busy = {e for m in self.moves.values() for e in (m.source_engine_id, m.target_engine_id)}
        assert not ends & busy, "two moves share an engine"
        assert command.kind in ("transfer", "recompute")
        self.moves[name] = command
        self.seen[f"move by {command.kind}"] += 1

    def _drop_context(self, command: cmd.DropContext) -> None:
        name = command.trajectory_id
        program = self.programs.get(name)
        if program is not None and program.step is None:  # a step that is placed there now fetches it from its source
            assert self.stage.trajectory(name).home != command.engine_id, "its next step finds it there"
        assert name not in self.moves or self.moves[name].target_engine_id != command.engine_id
        assert command.engine_id in self.stage.state.engines
        self.seen["context dropped"] += 1

    def _engine_gone_for_moves(self, engine_id: str) -> None:
        """The moves of a lost engine need not be reported; a report is stale."""
        for name, move in list(self.moves.items()):
            if engine_id in (move.source_engine_id, move.target_engine_id):
                self.stale.append((ev.MoveEnded, *move_facts(self.moves.pop(name), ok=self.pick((True, False)))))
                end = "source" if engine_id == move.source_engine_id else "target"
                waited = name in self.programs and self.programs[name].step is not None
                self.seen[f"move lost its {end}"] += 1
                self.seen[f"step waited for a move that lost its {end}"] += waited

    def _give_up_step(self, command: cmd.GiveUpStep) -> None:
        program = self.programs[command.step_id.trajectory_id]
        step = program.step
        assert step is not None
        assert step.engine_id is None
        assert step.request.step_id == command.step_id
        fits = [self.engines[e] for e in self.ready]
        too_long = all(e.max_context_tokens <= step.request.context_tokens for e in fits)
        assert step.losses > self.retries.max_losses or (fits and too_long)
        program.step, program.given_up = None, True

    def _run_action(self, command: cmd.RunAction) -> None:
        call = self.calls[command.action_id]
        assert call.host_id is None
        assert not call.orphaned
        assert call.losses <= self.retries.max_losses
        assert call.request.demand.allows(command.resources)
        assert self.hosts[command.host_id].pool == call.request.pool
        assert command.host_id not in self.leaving_hosts
        in_turns = self.stage.state.is_shared or not self.strict
        assert in_turns or call is self.head_of_line(call.request.pool), "it overtook another"
        self.line.remove(command.action_id)
        for name, amount in command.resources:
            assert self.free(command.host_id, name) >= amount, "oversubscribed"
        call.host_id, call.resources = command.host_id, command.resources
        self.seen["more than the least units"] += command.resources != call.request.demand.least
        assert command.reach_cpus <= self.hosts[command.host_id].cpus
        self.seen["may use idle CPUs"] += command.reach_cpus > command.cpus

    # -- what must hold after every event ----------------------------------------------------------------

    def check(self) -> None:
        state = self.stage.state
        assert state.alive == sum(p.admitted for p in self.programs.values())
        assert sum(state.unfinished_by_group.values()) == len(self.programs)
        assert self.stage.controller.moves.running == len(self.moves)
        for name, program in self.programs.items():
            record = self.stage.trajectory(name)
            step = program.step
            assert (record.kv is KvState.MOVING) == (name in self.moves), f"{name}: {record.kv}"
            assert record.steps_finished == program.steps_finished
            # When it was submitted, at the end of every step, and when a tool's label became known.
            told = 1 + program.steps_finished + program.tools_called
            predictor = self.stage.controller.runs.of(record).strategies.predictor
            assert program.predictions_asked == (0 if predictor is None else told)
            assert record.stopping == (step is not None and step.stopping)
            assert record.leaving == (step is not None and step.leaving)
            waits = name in state.waiting_steps
            runs = [i for i, engine in state.engines.items() if name in engine.inflight]
            if step is None:
                assert not waits and not runs, f"{name}: its step had ended"
                continue
            assert record.step == step.request
            assert waits == (step.engine_id is None and not record.held), f"{name} is lost"
            if record.held:
                assert step.engine_id is None and runs == [record.counted_on]
                continue
            assert runs == ([] if step.engine_id is None else [step.engine_id])
            # No strategy of ours holds a step back while an engine takes it and its context rests.
            assert not waits or self.may_wait(name), f"{name} waits beside a ready engine"
            assert name not in self.moves or waits, f"{name} runs while its context moves"
        for pool in () if state.is_shared else POOLS:  # several runs take turns
            self._check_line(pool)
        assert set(state.actions) == set(self.calls)

    def may_wait(self, name: str) -> bool:
        """Whether a requested step may be without an engine."""
        return not self.ready or name in self.moves

    def head_of_line(self, pool: str) -> Call | None:
        """The action of that pool that is to start next."""
        return next((self.calls[i] for i in self.line if self.calls[i].request.pool == pool), None)

    @property
    def strict(self) -> bool:
        """Whether actions of one pool start strictly in order."""
        return isinstance(self.stage.controller.strategies.actions, FirstComeMinimum)

    def _check_line(self, pool: str) -> None:
        """The head of the line does not fit; or, where others may go first, somebody runs who will make room."""
        if self.stage.controller.actions._allocates_at_s is not None:
            assert self.wakes, "it waits for a time that it did not ask for"
            return
        there = [h for h, host in self.hosts.items() if host.pool == pool and h not in self.leaving_hosts]
        head = self.head_of_line(pool)
        if head is None or not there:
            return
        need = head.request.demand.least
        if self.strict:
            fits = [all(self.free(h, name) >= amount for name, amount in need) for h in there]
            assert not any(fits), "the head of the line fits"
            return
        able = [h for h in there if all(self.hosts[h].resources[name] >= amount for name, amount in need)]
        at_work = {call.host_id for call in self.calls.values()}
        idle_kind = isinstance(self.stage.controller.strategies.actions, ElasticUnits | FixedUnits)
        assert not idle_kind or not able or at_work & set(there), "everything idles beside an action that fits"

    def free(self, host_id: str, resource: str) -> int:
        used = sum(call.resources[resource] for call in self.calls.values() if call.host_id == host_id)
        return self.hosts[host_id].resources[resource] - used

    def fresh(self, prefix: str) -> str:
        self.numbers += 1
        return f"{prefix}{self.numbers}"

    # -- moves: each a (possible, do) pair by name -------------------------------------------------------

    def possible(self, move: str) -> list[Any]:
        """What the move could be applied to now."""
        alive = {n: p for n, p in self.programs.items() if p.admitted and not p.given_up}
        held = [p.step for p in self.programs.values() if p.step is not None and p.step.engine_id]
        running = [a for a, c in self.calls.items() if c.host_id is not None]
        subjects: dict[str, list[Any]] = {
            "join_engine": list(ENGINE_SIZES) if len(self.ready) < 5 else [],
            "drain_engine": list(self.ready),
            "expire_engine": [e for e, expiring in self.draining.items() if not expiring],
            "lose_engine": list(self.engines),
            "engine_dies": [e for e in self.engines if e not in self.dying],
            "join_host": [(p, c) for p in POOLS for c in (1, 2, 4)] if len(self.hosts) < 4 else [],
            "drain_host": [h for h in self.hosts if h not in self.leaving_hosts],
            "lose_host": list(self.hosts),
            "submit": [0, 50] if len(self.programs) < 12 else [],
            "fork": list(alive) if len(self.programs) < 12 else [],
            "end": list(self.programs),
            "request": [n for n, p in alive.items() if p.step is None],
            "start": [s for s in held if not s.started],
            "finish": held,
            "abort": held,
            "fail": held,
            "cancel": [p.step for p in alive.values() if p.step is not None],
            "stopped": [s for s in held if s.stopping or s.leaving],
            "predict": self.asked,
            "move_ends": [(name, ok) for name in self.moves for ok in (True, True, False)],
            "act": list(alive),
            "act_ends": running,
            "act_cancel": [a for a, c in self.calls.items() if not c.orphaned],
            "time": sorted(self.wakes)[:1],
            "stale": self.stale,
        }
        return subjects[move]

    def do(self, move: str, subject: Any) -> None:
        getattr(self, f"_do_{move}")(subject)

    def _do_join_engine(self, size: int) -> None:
        transfers = self.pick((True, True, False))
        made = engine_of(self.fresh("E"), self.pick((1, 2, 4)), size, self.kv_tokens, transfers)
        self._joins(made)

    def _joins(self, made: EngineDescription) -> None:
        self.engines[made.engine_id] = made
        self.ready[made.engine_id] = None
        self.tell(ev.EngineJoined, made)

    def _do_drain_engine(self, engine_id: str) -> None:
        self.ready.pop(engine_id, None)
        self.draining[engine_id] = False
        self.stale.append((ev.EngineDraining, engine_id))
        self.tell(ev.EngineDraining, engine_id)

    def _do_expire_engine(self, engine_id: str) -> None:
        self.draining[engine_id] = True
        self.stale.append((ev.EngineExpiring, engine_id))
        self.tell(ev.EngineExpiring, engine_id)

    def _do_lose_engine(self, engine_id: str) -> None:
        """Its worker dies: none of its steps reports."""
        for step in self._steps_at(engine_id):
            if self.pick((True, False)):  # a message that was on the wire
                self.stale.append((ev.StepFinished, *step.identity, 5, 0, "stop"))
                self.stale.append((ev.StepStarted, *step.identity))
            step.losses += step.started
            step.engine_id, step.started, step.stopping, step.leaving = None, False, False, False
        self._engine_gone_for_moves(engine_id)
        del self.engines[engine_id]
        self.ready.pop(engine_id, None)
        self.dying.pop(engine_id, None)
        self.draining.pop(engine_id, None)
        self.stale.append((ev.EngineLost, engine_id, "again", self.pick((True, False))))
        self.tell(ev.EngineLost, engine_id, "worker died", True)

    def _do_engine_dies(self, engine_id: str) -> None:
        """The engine dies under a living worker: its steps report by themselves."""
        self._engine_gone_for_moves(engine_id)
        self.ready.pop(engine_id, None)
        self.dying[engine_id] = None
        self.draining.pop(engine_id, None)
        self.stale.append((ev.EngineLost, engine_id, "again", False))
        self.tell(ev.EngineLost, engine_id, "engine died", False)

    def _steps_at(self, engine_id: str) -> list[Step]:
        steps = [p.step for p in self.programs.values() if p.step is not None]
        return [step for step in steps if step.engine_id == engine_id]

    def _do_join_host(self, kind: tuple[str, int]) -> None:
        made = host_of(self.fresh("H"), kind[1], kind[0], kind[1])
        self.hosts[made.host_id] = made
        seen = self.seen_hosts.setdefault(made.pool, {})
        seen[made.resources] = None
        self.tell(ev.HostJoined, made)
        mine = [self.calls[i].request for i in self.line if self.calls[i].request.pool == made.pool]
        for request in mine:
            able = (all(has[name] >= n for name, n in request.demand.least) for has in seen)
            assert any(able), "one waits that can never run"

    def _do_drain_host(self, host_id: str) -> None:
        self.leaving_hosts[host_id] = False
        self.stale.append((ev.HostDraining, host_id))
        self.tell(ev.HostDraining, host_id)

    def _do_lose_host(self, host_id: str) -> None:
        del self.hosts[host_id]
        self.leaving_hosts.pop(host_id, None)
        back = []
        for name, call in list(self.calls.items()):
            if call.host_id == host_id:
                self.stale.append((ev.ActionFinished, name, host_id, 0.1))
                call.host_id, call.resources = None, NO_RESOURCES
                call.losses += 1
                if call.orphaned:
                    del self.calls[name]
                else:
                    back.append(name)
        self.line = [*sorted(back, key=lambda name: self.calls[name].number), *self.line]
        self.stale.append((ev.HostLost, host_id))
        self.tell(ev.HostLost, host_id)

    def _do_submit(self, prompt_tokens: int) -> None:
        name = self.fresh("t")
        self.programs[name] = Program()
        group = self.pick(("g1", "g2", "g3"))
        self.tell(ev.TrajectorySubmitted, trajectory_spec(name, prompt_tokens, group))

    def _do_fork(self, parent: str) -> None:
        name = self.fresh(f"{parent}#")
        self.programs[name] = Program(admitted=True)
        record = self.stage.trajectory(parent)
        spec = trajectory_spec(name, record.context_tokens, record.spec.group_id)
        self.stale.append((ev.TrajectoryForked, replace(spec, trajectory_id=f"{name}-late"), "ended long ago"))
        self.tell(ev.TrajectoryForked, spec, parent)
        assert self.stage.trajectory(name).state is TrajectoryState.THINKING

    def _do_end(self, name: str) -> None:
        del self.programs[name]
        self.seen["ended while its context moved"] += name in self.moves
        for action, call in list(self.calls.items()):
            if call.request.trajectory_id == name:
                call.orphaned = True
                if call.host_id is None:
                    del self.calls[action]
                    self.line.remove(action)
        self.stale.append((ev.TrajectoryEnded, name, "completed"))
        self.stale.append((ev.StepRequested, step_of(name, 99)))
        self.tell(ev.TrajectoryEnded, name, "completed")

    def _do_request(self, name: str) -> None:
        program = self.programs[name]
        last = program.retry
        if last is None:
            request = step_of(name, program.next_index, context=self.pick(CONTEXTS))
            program.next_index += 1
        else:
            at = last.request
            grown = at.context_tokens + last.new_tokens
            again = at.step_id
            request = step_of(name, again.step_index, attempt=again.attempt + 1, context=grown)
            self.seen["stopped and asked for again"] += last.stopping
        program.step = Step(request)
        if last is not None:
            program.step.losses, program.step.preemptions = last.losses, last.preemptions
        program.retry = None
        self.seen["step waited for a move"] += name in self.moves
        self.tell(ev.StepRequested, request)

    def _do_start(self, step: Step) -> None:
        step.started = True
        self.stale.append((ev.StepStarted, *step.identity))
        self.tell(ev.StepStarted, *step.identity)

    def _do_finish(self, step: Step, reason: str = "stop") -> None:
        step.new_tokens = self.pick((0, 7, 40))
        facts = (*step.identity, step.new_tokens, 0, reason)
        self._step_ended(step, (ev.StepFinished, *facts))
        self.programs[step.request.step_id.trajectory_id].steps_finished += reason != "abort"
        self.tell(ev.StepFinished, *facts)

    def _do_cancel(self, step: Step) -> None:
        """Its program gives it up, wherever it is; the same step may be asked for again."""
        step_id = step.request.step_id
        program = self.programs[step_id.trajectory_id]
        program.retry, program.step, step.new_tokens = step, None, 0
        if step.engine_id is not None:
            self.stale.append((ev.StepStarted, *step.identity))
            self.seen["cancelled on an engine"] += 1
        self.stale.append((ev.StepCancelled, step_id))
        self.tell(ev.StepCancelled, step_id)

    def _do_abort(self, step: Step) -> None:
        """The engine answers early, and the driver goes on from what there is."""
        self.programs[step.request.step_id.trajectory_id].retry = step
        self._do_finish(step, "abort")

    def _do_stopped(self, step: Step) -> None:
        """The answer to an order to stop: what the step has so far."""
        self._do_abort(step)

    def _do_predict(self, asked: tuple[str, int]) -> None:
        """The predictor answers; by then the trajectory may have gone on, or be over."""
        self.asked.remove(asked)
        name, steps_finished = asked
        tokens = self.pick((0.0, 20.0, 300.0, 900.0, 5000.0))
        learnt_from = self.pick((None, 0, 3, 1000))
        facts = (name, steps_finished, Prediction(tokens, tokens * 1.5, learnt_from=learnt_from))
        if name in self.programs and self.programs[name].steps_finished == steps_finished:
            self.tell(ev.PredictionMade, *facts)
        else:
            self.seen["prediction came late"] += 1
            self.stage.late(ev.PredictionMade, *facts)

    def _do_move_ends(self, ending: tuple[str, bool]) -> None:
        name, ok = ending
        move = self.moves.pop(name)
        facts = move_facts(move, ok=ok)
        drained = list(self.draining)
        self.stale.append((ev.MoveEnded, *facts))
        self.seen[f"move ended {'well' if ok else 'badly'}"] += 1
        self.tell(ev.MoveEnded, *facts)
        if name in self.programs and self.programs[name].step is None:
            arrived = ok and move.target_engine_id in self.ready
            stays = None if move.source_engine_id in drained else move.source_engine_id
            home = move.target_engine_id if arrived else stays
            assert self.stage.trajectory(name).home == home

    def _do_fail(self, step: Step) -> None:
        self.programs[step.request.step_id.trajectory_id].retry = step
        died = step.engine_id in self.dying
        step.losses += died and step.started
        cause = ev.ENGINE_LOST if died else "refused"
        self._step_ended(step, (ev.StepFailed, *step.identity, cause))
        self.tell(ev.StepFailed, *step.identity, cause)

    def _step_ended(self, step: Step, message: tuple[Any, ...]) -> None:
        self.programs[step.request.step_id.trajectory_id].step = None
        self.stale.append(message)
        self.stale.append((ev.StepStarted, *step.identity))

    def _do_act(self, name: str) -> None:
        least, memory = self.pick((0, 1, 1, 2, 4)), self.pick((0, 0, 1, 2))
        request = action_of(self.fresh("x"), name, cpus=(least, least + 2), pool=self.pick(POOLS))
        only = self.pick(((), (), (least, least + 1, least + 2)))
        demand = {CPUS: Amounts(least, least + 2, only), MEMORY: Amounts(memory, memory)}
        profile = self.pick((None, DurationProfile(4.0, 0.1), DurationProfile(1.0, 1.0)))
        request = replace(request, demand=ResourceDemand.of(demand), label=self.pick(LABELS), profile=profile)
        self.calls[request.action_id] = Call(request, self.numbers)
        self.line.append(request.action_id)
        self.programs[name].tools_called += 1
        self.tell(ev.ActionRequested, request)

    def _do_act_ends(self, action_id: str) -> None:
        call = self.calls.pop(action_id)
        self.stale.append((ev.ActionFinished, action_id, call.host_id, 0.1))
        self.tell(ev.ActionFinished, action_id, call.host_id, self.pick((0.1, 3.0)), self.pick((True, False)))

    def _do_act_cancel(self, action_id: str) -> None:
        """Its program goes on without it."""
        call = self.calls[action_id]
        call.orphaned = True
        if call.host_id is None:
            del self.calls[action_id]
            self.line.remove(action_id)
        self.seen["an action cancelled"] += 1
        self.stale.append((ev.ActionCancelled, action_id))
        self.tell(ev.ActionCancelled, action_id)

    def _do_time(self, at_s: float) -> None:
        """The time comes that the controller asked for."""
        self.wakes.remove(at_s)
        self.stage.at = max(self.stage.at, at_s - 1.0)
        self.tell(ev.TimeReached)

    def _do_stale(self, message: tuple[Any, ...]) -> None:
        """A message that comes twice, too late, or from a lost engine or host."""
        if message[0] is ev.StepStarted:
            for program in self.programs.values():
                if program.step is not None and program.step.identity == message[1:]:
                    return  # not stale: the step is there, and would start now
        if message[0] is ev.EngineLost and message[3] and message[1] in self.dying:
            return
        if message[0] is ev.MoveEnded and message[1] in self.moves:
            move = self.moves[message[1]]
            if (move.source_engine_id, move.target_engine_id) == (message[-1], message[2]):
                return  # the same move is under way again
            self.seen["report of an earlier move"] += 1
        self.stage.late(*message)

    # -- the end of the world ----------------------------------------------------------------------------

    def drain(self) -> None:
        """Make everything healthy, let every program take one more step, and end every trajectory."""
        for engine_id in list(self.dying):
            for step in self._steps_at(engine_id):
                self._do_fail(step)
        for pool in POOLS:
            self._do_join_host((pool, LARGEST_CPUS))
        self._pass_time()
        self._do_join_engine(100_000)
        rounds = 0
        while self.programs:
            rounds += 1
            assert rounds < 10_000, "the world does not come to its end"
            self._advance_all()
        while running := self.possible("act_ends"):
            self._do_act_ends(running[0])
            self._pass_time()
        self._end_moves()
        self._check_empty()
        assert not self.draining, "one drains for ever"
        assert all(self.leaving_hosts.values())

    def _pass_time(self) -> None:
        while self.wakes:
            self._do_time(min(self.wakes))

    def _advance_all(self) -> None:
        self._pass_time()
        while self.asked:
            self._do_predict(self.asked[0])
        admitted = [n for n, p in self.programs.items() if p.admitted]
        assert admitted, "trajectories wait and none is admitted"
        self._end_moves()
        for step in self.possible("finish"):
            self._do_finish(step)
        for action_id in self.possible("act_ends"):
            self._do_act_ends(action_id)
        busy = {c.request.trajectory_id for c in self.calls.values()}
        for name in admitted:
            program = self.programs[name]
            waits = program.step is not None and program.step.engine_id is None
            assert not waits or self.stage.trajectory(name).held or self.may_wait(name), "a step waits for ever"
            if program.step is None and name not in busy:
                self._do_end(name)

    def _end_moves(self) -> None:
        while self.moves:
            self._do_move_ends((next(iter(self.moves)), True))

    def _check_empty(self) -> None:
        state = self.stage.state
        assert not state.trajectories
        assert not state.actions
        assert not state.unadmitted and not state.waiting_steps and not state.waiting_actions
        assert state.alive == 0
        assert not state.unfinished_by_group
        totals = self.stage.controller.moves.totals
        started = {kind: self.seen[f"move by {kind}"] for kind in totals}
        assert {kind: total.started for kind, total in totals.items()} == started
        assert not self.stage.controller.moves._pending
        assert all(host.free == dict(host.spec.resources) for host in state.hosts.values())
        assert not state.stranded and not state.new_actions
        assert all(e.inflight_tokens == e.resident_tokens == e.generating == 0 for e in state.engines.values())


# How often each move is made by `play`; what makes progress comes most.
WEIGHTS: Final[dict[str, float]] = {
    "join_engine": 3,
    "drain_engine": 2,
    "expire_engine": 6,
    "lose_engine": 3,
    "engine_dies": 1,
    "join_host": 4,
    "drain_host": 1,
    "lose_host": 2,
    "submit": 8,
    "fork": 0.5,
    "end": 3,
    "request": 14,
    "start": 14,
    "finish": 12,
    "abort": 2,
    "fail": 2,
    "cancel": 2,
    "act_cancel": 1,
    "stopped": 6,
    "predict": 14,
    "move_ends": 5,
    "act": 10,
    "act_ends": 8,
    "time": 6,
    "stale": 4,
}


def new_world(
    preset: str, pick: Pick[Any], *, seed: int = 0, max_losses: int = 2, overrides: Sequence[str] = ()
) -> World:
    """An empty world; whether its engines tell how large their KV cache is goes by the seed."""
    retries = RetryPolicy(max_losses, max_pool_wait_s=(0, 300)[seed % 2])
    chosen = strategies_of(preset, seed=seed, overrides=overrides)
    stage = Stage(strategies=chosen, retries=retries)
    return World(stage, retries, pick, kv_tokens=(0, 600, 20_000)[seed % 3])


def strategies_of(preset: str, *, seed: int, overrides: Sequence[str]) -> StrategySet:
    """What a world of that name is played with: a preset, or the restless kind of heddle."""
    if preset == RESTLESS:
        return restless_heddle(seed=seed, overrides=overrides)
    return build_strategies(preset, seed=seed, overrides=overrides)


def play(
    preset: str,
    *,
    seed: int,
    moves: int,
    overrides: Sequence[str] = (),
) -> World:
    """A world of that many random moves; with an odd seed its engines are rarely lost."""
    rng = random.Random(seed)
    world = new_world(preset, rng.choice, seed=seed, max_losses=seed % 3, overrides=overrides)
    calm = {"lose_engine": 0.4, "drain_engine": 0.4, "engine_dies": 0.4} if seed % 2 else {}
    weights = {**WEIGHTS, **calm}
    for move in rng.choices(list(weights), list(weights.values()), k=moves):
        if subjects := world.possible(move):
            world.do(move, rng.choice(subjects))
    world.drain()
    return world


def main() -> None:
    """Print the journals of one world per preset."""
    for preset in WORLDS:
        for overrides in ([], ["admission=at-most,alive=9"]):
            for line in play(preset, seed=11, moves=300, overrides=overrides).stage.journal:
                sys.stdout.write(json.dumps([preset, line]) + "\n")


if __name__ == "__main__":
    main()
