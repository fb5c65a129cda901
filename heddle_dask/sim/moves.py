"""Simulated moves of contexts between engines, at the cost that they have live.

A *transfer* is an export and an import. The export is a step of one token on the source: it computes what the cache of
the source lacks, and pins the blocks until the target has them. Then the link takes its time. The import is a step of
one token on the target, which computes what no whole block holds. A *recompute* is the step on the target alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.ids import EngineId, PolicyVersion
from heddle_dask.sim.engine import SimulatedEngine
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.sim.kv_cache import SimulatedJob
from heddle_dask.sim.loop import VirtualTime
from heddle_dask.sim.program import Program

# As live, the steps of a move precede all queued steps.
_FIRST = float("-inf")


@dataclass(slots=True, eq=False)
class _Move:
    """A move under way; `version` are the weights under which the source computed the KV."""

    command: cmd.MoveContext
    program: Program
    tokens: int
    began_s: float
    version: PolicyVersion


class SimulatedMoves:
    """The moves of a simulated world.

    Parameters
    ----------
    keeps_kv
        Whether KV of other weights may be used.
    tell
        Takes the `MoveEnded`. A move from or to a lost engine reports nothing: the controller ends it at the loss.
    """

    def __init__(
        self,
        fleet: SimulatedFleet,
        time: VirtualTime,
        engines: Mapping[EngineId, SimulatedEngine],
        versions: Mapping[EngineId, PolicyVersion],
        keeps_kv: Callable[[], bool],
        tell: Callable[[ev.Event], None],
    ) -> None:
        self._fleet = fleet
        self._time = time
        self._engines = engines
        self._versions = versions
        self._keeps_kv = keeps_kv
        self._tell = tell
        self._exports: dict[SimulatedJob, _Move] = {}
        self._warm_ups: dict[SimulatedJob, _Move] = {}

    @property
    def running(self) -> int:
        return len(self._exports) + len(self._warm_ups)

    def begin(self, command: cmd.MoveContext, program: Program) -> None:
        """Move what the source has had of a context; an observation that no step has seen is not part of it."""
        version = self._versions[command.source_engine_id]
        move = _Move(command, program, program.delivered_tokens, self._time.now_s, version)
        job = self._one_token_step(move)
        if command.kind == "recompute":
            self._send(job, command.target_engine_id, self._warm_ups, move)
        else:
            job.pins_kv = True
            self._send(job, command.source_engine_id, self._exports, move)

    def step_ended(self, job: SimulatedJob) -> None:
        export = self._exports.pop(job, None)
        if export is None:
            self._end(self._warm_ups.pop(job))
            return
        link = self._fleet.link
        target = self._engines[export.command.target_engine_id]
        there = 0 if link.whole else target.kv_cache.hit_tokens(job)
        self._time.after(link.setup_s + link.token_s * (export.tokens - there), self._arrived, job, export)

    def _arrived(self, job: SimulatedJob, move: _Move) -> None:
        source = self._engines[move.command.source_engine_id]
        target = self._engines[move.command.target_engine_id]
        ends = (move.command.source_engine_id, move.command.target_engine_id)
        usable = self._keeps_kv() or all(self._versions[end] == move.version for end in ends)
        source.unpin(job, keep=usable)
        if source.lost or target.lost:
            return
        if not usable:
            self._end(move, "the weights changed")
            return
        landed = self._one_token_step(move)
        if not target.insert(landed):
            self._end(move, "no room")
            return
        self._warm_ups[landed] = move
        target.submit(landed)

    def _one_token_step(self, move: _Move) -> SimulatedJob:
        plan = move.program.plan
        return SimulatedJob(
            prompt_tokens=move.tokens,
            length=1,
            priority=_FIRST,
            trajectory_id=plan.trajectory_id,
            group_id=plan.group_id,
            shared_tokens=plan.prompt_tokens,
        )

    def _send(self, job: SimulatedJob, engine_id: EngineId, under_way: dict[SimulatedJob, _Move], move: _Move) -> None:
        under_way[job] = move
        self._time.after(self._fleet.delays.start_s, self._engines[engine_id].submit, job)

    def _end(self, move: _Move, cause: str = "") -> None:
        command = move.command
        self._tell(
            ev.MoveEnded(
                at=self._time.now_s,
                trajectory_id=command.trajectory_id,
                target_engine_id=command.target_engine_id,
                ok=not cause,
                kind=command.kind,
                seconds=self._time.now_s - move.began_s,
                tokens=0 if cause else move.tokens,
                cause=cause,
                source_engine_id=command.source_engine_id,
            )
        )
