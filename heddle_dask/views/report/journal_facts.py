"""What the journal of a session tells that records do not: waits for admission and moves, lost attempts, predictions.

Works on the journal's rows as they are stored, ``[event, [command, ...]]``, each a list of a type name and its fields:
decoding the lines of 10,000 trajectories into events would take longer than everything else in a report.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from heddle_dask.core import commands as cm
from heddle_dask.core import events as ev
from heddle_dask.core.journal_codec import missing_lines
from heddle_dask.core.nouns import EngineDescription, HostDescription
from heddle_dask.core.resources import Resources
from heddle_dask.core.value_types import check_types
from heddle_dask.views.accounts import ControlFacts, StepWaits
from heddle_dask.views.report.idle_engines import IdleEngines

Row = Sequence[Any]


@dataclass(slots=True)
class EngineFacts:
    """One engine incarnation; seconds of the session, nan for what did not happen."""

    engine_id: str
    slots: int
    tp_degree: int
    kv_capacity_tokens: int
    joined_s: float
    lost_s: float = math.nan
    reason: str = ""


@dataclass(slots=True)
class HostFacts:
    host_id: str
    cpus: int
    joined_s: float
    lost_s: float = math.nan


@dataclass(slots=True)
class MoveFacts:
    """One move of a context; `exposed_s` of it a step has waited."""

    trajectory_id: str
    source: str
    target: str
    kind: str
    started_s: float
    ended_s: float = math.nan
    ok: bool | None = None
    tokens: int = 0
    cause: str = ""
    exposed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PredictionFacts:
    """One answer of the predictor: tokens that were thought to be left after `steps_finished` steps."""

    at_s: float
    steps_finished: int
    tokens: float
    tokens_q90: float
    source: str


@dataclass(slots=True)
class _OpenStep:
    index: int
    requested_s: float
    started_s: float = math.nan
    engine_id: str = ""


def _places(kind: type[Any], *names: str) -> tuple[int, ...]:
    """Where fields of an event or a command are in its row; the type name is in front."""
    order = [each.name for each in fields(kind)]
    return tuple(order.index(name) + 1 for name in names)


_SUBMITTED = _places(ev.TrajectorySubmitted, "at", "trajectory")
_FORKED = _places(ev.TrajectoryForked, "at", "trajectory", "parent")
_PROGRAM_ENDED = _places(ev.ProgramEnded, "at", "trajectory_id")
_ENDED = _places(ev.TrajectoryEnded, "at", "trajectory_id")
_REQUESTED = _places(ev.StepRequested, "at", "step")
_STARTED = _places(ev.StepStarted, "at", "step_id", "engine_id")
_FINISHED = _places(ev.StepFinished, "step_id")
_FAILED = _places(ev.StepFailed, "at", "step_id")
_CANCELLED = _places(ev.StepCancelled, "at", "step_id")
_PREDICTED = _places(ev.PredictionMade, "at", "trajectory_id", "steps_finished", "prediction")
_MOVED = _places(ev.MoveEnded, "at", "trajectory_id", "target_engine_id", "ok", "tokens", "cause")
_JOINED = _places(ev.EngineJoined, "at", "engine")
_ENGINE_LOST = _places(ev.EngineLost, "at", "engine_id", "reason", "stranded")
_HOST = _places(ev.HostJoined, "at", "host")
_HOST_LOST = _places(ev.HostLost, "at", "host_id")
_ADMIT = _places(cm.AdmitTrajectory, "trajectory_id")
_START = _places(cm.StartStep, "step_id", "engine_id")
_GIVE_UP = _places(cm.GiveUpStep, "step_id")
_ABORT = _places(cm.AbortStep, "step_id", "engine_id", "reason")
_MOVE = _places(cm.MoveContext, "trajectory_id", "source_engine_id", "target_engine_id", "kind")


class SessionFacts:
    """A fold of the lines of one session.

    Attributes
    ----------
    trajectories
        By id; what forks did is with the trajectory that they left.
    aborts
        (time, trajectory, engine, reason) of steps that were told to stop.
    idle
        Seconds of each engine without a step while steps waited.
    events, missing
        Lines that were taken, and lines that the journal lacks; what they told is not in the facts.
    """

    def __init__(self) -> None:
        self.trajectories: dict[str, ControlFacts] = {}
        self.predictions: dict[str, list[PredictionFacts]] = {}
        self.engines: dict[str, EngineFacts] = {}
        self.hosts: dict[str, HostFacts] = {}
        self.moves: list[MoveFacts] = []
        self.aborts: list[tuple[float, str, str, str]] = []
        self.events = 0
        self.missing = 0
        self.last_s = 0.0
        self._roots: dict[str, str] = {}
        self._open: dict[str, _OpenStep] = {}
        self.idle = IdleEngines()
        self._moving: dict[str, MoveFacts] = {}
        self._takes: dict[str, Callable[[Row], None]] = {
            "TrajectorySubmitted": self._submitted,
            "TrajectoryForked": self._forked,
            "ProgramEnded": self._program_ended,
            "TrajectoryEnded": self._ended,
            "StepRequested": self._requested,
            "StepStarted": self._started,
            "StepFinished": self._finished,
            "StepFailed": self._failed,
            "StepCancelled": self._cancelled,
            "PredictionMade": self._predicted,
            "MoveEnded": self._moved,
            "EngineJoined": self._engine_joined,
            "EngineLost": self._engine_lost,
            "HostJoined": self._host_joined,
            "HostLost": self._host_lost,
        }
        self._obeys: dict[str, Callable[[float, Row], None]] = {
            "AdmitTrajectory": self._admit,
            "StartStep": self._start,
            "GiveUpStep": self._give_up,
            "AbortStep": self._abort,
            "MoveContext": self._move,
        }

    @property
    def makespan_s(self) -> float:
        """From its first submission to its last event, also where it was killed."""
        return self.last_s - min((each.submitted_s for each in self.trajectories.values()), default=self.last_s)

    def take(self, lines: Iterable[Sequence[Any]]) -> None:
        for line in lines:
            missing = missing_lines(line)
            if missing:
                self.missing += missing
                continue
            event, commands = line
            self.events += 1
            self.last_s = at = float(event[1])
            self.idle.passed(at)
            take = self._takes.get(event[0])
            if take is not None:
                take(event)
            for command in commands:
                obey = self._obeys.get(command[0])
                if obey is not None:
                    obey(at, command)

    def check(self) -> None:
        """Raise `TypeError` for what `take` found in lines that no controller wrote."""
        predictions = (made for each in self.predictions.values() for made in each)
        for tables in (self.trajectories, self.engines, self.hosts):
            if not all(isinstance(name, str) for name in tables):
                raise TypeError("an id that is no text")
        for facts in itertools.chain(
            self.trajectories.values(), self.engines.values(), self.hosts.values(), self.moves, predictions
        ):
            check_types(facts)

    # -- trajectories and steps --------------------------------------------------------------------

    def _submitted(self, row: Row) -> None:
        at, spec = (row[place] for place in _SUBMITTED)
        self.trajectories[spec[0]] = ControlFacts(submitted_s=at)

    def _forked(self, row: Row) -> None:
        _, spec, parent = (row[place] for place in _FORKED)
        root = self._roots.get(parent, parent)
        self._roots[spec[0]] = root
        if root in self.trajectories:
            self.trajectories[root].paths.append(spec[0][len(root) :])

    def _admit(self, at: float, row: Row) -> None:
        facts = self.trajectories.get(row[_ADMIT[0]])
        if facts is not None and math.isnan(facts.admitted_s):
            facts.admitted_s = at

    def _program_ended(self, row: Row) -> None:
        _, name = (row[place] for place in _PROGRAM_ENDED)
        self._close(name, math.nan, is_failure=False)

    def _ended(self, row: Row) -> None:
        at, name = (row[place] for place in _ENDED)
        self._close(name, math.nan, is_failure=False)
        if name in self.trajectories:
            self.trajectories[name].ended_s = at

    def _requested(self, row: Row) -> None:
        at, step = (row[place] for place in _REQUESTED)
        name, index, _ = step[0]
        self._take_out(name)
        self._open[name] = _OpenStep(index, at)
        self.idle.requested()

    def _start(self, at: float, row: Row) -> None:
        step_id, engine_id = (row[place] for place in _START)
        open_step = self._open.get(step_id[0])
        if open_step is not None and not open_step.engine_id:
            open_step.engine_id = engine_id
            self.idle.placed(engine_id)

    def _started(self, row: Row) -> None:
        at, step_id, engine_id = (row[place] for place in _STARTED)
        open_step = self._open.get(step_id[0])
        if open_step is not None and open_step.engine_id == engine_id and math.isnan(open_step.started_s):
            open_step.started_s = at
            self.idle.started()

    def _take_out(self, name: str) -> _OpenStep | None:
        open_step = self._open.pop(name, None)
        if open_step is not None:
            self.idle.left(open_step.engine_id, waited=math.isnan(open_step.started_s))
        return open_step

    def _finished(self, row: Row) -> None:
        self._take_out(row[_FINISHED[0]][0])

    def _failed(self, row: Row) -> None:
        at, step_id = (row[place] for place in _FAILED)
        self._close(step_id[0], at, is_failure=True)

    def _cancelled(self, row: Row) -> None:
        at, step_id = (row[place] for place in _CANCELLED)
        self._close(step_id[0], at, is_failure=False)

    def _give_up(self, at: float, row: Row) -> None:
        self._close(row[_GIVE_UP[0]][0], at, is_failure=True)

    def _abort(self, at: float, row: Row) -> None:
        step_id, engine_id, reason = (row[place] for place in _ABORT)
        self.aborts.append((at, self._roots.get(step_id[0], step_id[0]), engine_id, reason))

    def _close(self, name: str, at: float, is_failure: bool) -> None:
        """The open step of a context has ended without a result; nan: with its trajectory."""
        open_step = self._take_out(name)
        found = self._facts_of(name)
        if open_step is None or found is None:
            return
        facts, path = found
        facts.attempts.append((path, open_step.index, open_step.requested_s, at))
        if is_failure:
            self._waits(facts, path, open_step.index).failed_s += at - open_step.requested_s

    def _facts_of(self, name: str) -> tuple[ControlFacts, str] | None:
        root = self._roots.get(name, name)
        facts = self.trajectories.get(root)
        return None if facts is None else (facts, name[len(root) :])

    @staticmethod
    def _waits(facts: ControlFacts, path: str, index: int) -> StepWaits:
        return facts.waits.setdefault((path, index), StepWaits())

    def _predicted(self, row: Row) -> None:
        at, name, steps_finished, prediction = (row[place] for place in _PREDICTED)
        made = PredictionFacts(at, steps_finished, prediction[0], prediction[1], prediction[2])
        self.predictions.setdefault(name, []).append(made)

    # -- moves -------------------------------------------------------------------------------------

    def _move(self, at: float, row: Row) -> None:
        name, source, target, kind = (row[place] for place in _MOVE)
        move = MoveFacts(name, source, target, kind, started_s=at)
        self._moving[move.trajectory_id] = move
        self.moves.append(move)

    def _moved(self, row: Row) -> None:
        at, name, target, ok, tokens, cause = (row[place] for place in _MOVED)
        move = self._moving.get(name)
        if move is None or move.target != target:
            return
        del self._moving[name]
        move.ended_s, move.ok, move.tokens, move.cause = at, ok, tokens, cause
        open_step = self._open.get(name)
        # A step that is requested during the move waits for its end; one that was placed before does not.
        if open_step is not None and not open_step.engine_id:
            move.exposed_s = at - max(open_step.requested_s, move.started_s)
            found = self._facts_of(name)
            if found is not None:
                self._waits(*found, open_step.index).moving_s += move.exposed_s

    # -- engines and hosts -------------------------------------------------------------------------

    def _engine_joined(self, row: Row) -> None:
        at, engine = (row[place] for place in _JOINED)
        described = EngineDescription(*engine)
        self.engines[described.engine_id] = EngineFacts(
            described.engine_id, described.slots, described.tp_degree, described.kv_capacity_tokens, at
        )
        self.idle.joined(described.engine_id)

    def _engine_lost(self, row: Row) -> None:
        at, name, reason, stranded = (row[place] for place in _ENGINE_LOST)
        engine = self.engines.get(name)
        if engine is not None and math.isnan(engine.lost_s):
            engine.lost_s, engine.reason = at, reason
            self.idle.lost(name)
        if not stranded:
            return  # each of its steps still reports
        for context, step in self._open.items():
            if step.engine_id != name:
                continue
            found = self._facts_of(context)
            if found is not None and not math.isnan(step.started_s):
                self._waits(*found, step.index).stranded_s += at - step.started_s
            self.idle.left("", waited=math.isnan(step.started_s))
            self.idle.requested()
            step.engine_id, step.started_s = "", math.nan

    def _host_joined(self, row: Row) -> None:
        at, host = (row[place] for place in _HOST)
        host_id, (amounts,), pool = host
        described = HostDescription(host_id, Resources.of(dict(amounts)), pool)
        self.hosts[described.host_id] = HostFacts(described.host_id, described.cpus, at)

    def _host_lost(self, row: Row) -> None:
        at, name = (row[place] for place in _HOST_LOST)
        if name in self.hosts:
            self.hosts[name].lost_s = at
