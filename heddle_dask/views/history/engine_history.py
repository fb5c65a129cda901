"""The part of a history about engines and the moves of contexts between them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.ids import TrajectoryId
from heddle_dask.views.history.bounded import FailureTally, ThinnedSeries
from heddle_dask.views.history.lanes import EngineRow, Lane, OpenMove
from heddle_dask.views.history.phases import LLM_QUEUE

MOST_SERIES: Final = 64
"""Engines whose series are kept: the latest ones."""

LIVING: Final = ("ready", "draining")
"""States of engines that have, or may get, steps."""

MOST_LOST: Final = 64
"""Lost engines that are remembered: a session of days may lose thousands."""


_CHARTED: Final = ("generating", "queued", "resident")


@dataclass(slots=True)
class MoveCounts:
    """Totals of the moves of one kind, as `core.migrations.MoveTotals`; `from_leaving`: as in `MoveView`."""

    started: int = 0
    from_leaving: int = 0
    running: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    exposed: int = 0
    exposed_s: float = 0.0


class EngineHistory:
    def __init__(
        self,
        lanes: Mapping[TrajectoryId, Lane],
        enter: Callable[[Lane, int, float], None],
        series: ThinnedSeries[Any],
        failures: FailureTally,
    ) -> None:
        self._lanes = lanes
        self._enter = enter
        self._series = series
        self._failures = failures
        self.rows: dict[str, EngineRow] = {}
        self.joined_count = 0
        self.stranded_steps = 0  # steps that waited again because their engine was lost
        self._lost: deque[str] = deque()
        self.moving: dict[TrajectoryId, OpenMove] = {}
        self.moves: dict[str, MoveCounts] = {}
        self.charted: deque[int] = deque()

    def joined(self, event: ev.EngineJoined) -> None:
        spec = event.engine
        taken = {row.seat for row in self.rows.values() if row.state in LIVING}
        row = EngineRow(
            index=self.joined_count,
            seat=next(seat for seat in count() if seat not in taken),
            engine_id=spec.engine_id,
            slots=spec.slots,
            tp_degree=spec.tp_degree,
            kv_capacity_tokens=spec.kv_capacity_tokens,
            joined_s=event.at,
        )
        self.joined_count += 1
        self.rows[spec.engine_id] = row
        series = self._series
        for what in _CHARTED:
            series.add_column((row.index, what))
        self.charted.append(row.index)
        self._leave_drained()
        if len(self.charted) > MOST_SERIES:
            oldest = self.charted.popleft()
            for what in _CHARTED:
                series.columns.pop((oldest, what), None)

    def draining(self, event: ev.EngineDraining) -> None:
        row = self.rows.get(event.engine_id)
        if row is not None and row.state == "ready":
            row.state = "draining"
            self._leave_drained()

    def expiring(self, event: ev.EngineExpiring) -> None:
        """A draining engine is about to end: what does not run or move there has left it."""
        row = self.rows.get(event.engine_id)
        if row is None or row.state != "draining" or row.expiring:
            return
        row.expiring = True
        for lane in self._lanes.values():
            if lane.home is row and lane.engine is not row and lane.trajectory_id not in self.moving:
                lane.has_kv = False
                lane.move_home(None)

    def drained(self, command: cmd.ReleaseEngine, at: float) -> None:
        row = self.rows.get(command.engine_id)
        if row is not None and row.state == "draining":
            row.state = "drained"

    def leave(self, lane: Lane) -> None:
        """A trajectory at rest whose engine drains, and that has no KV cache there, has left it."""
        home = lane.home
        if home is None or home.state != "draining" or lane.step is not None or lane.has_kv:
            return
        if lane.trajectory_id not in self.moving:
            lane.move_home(None)

    def _leave_drained(self) -> None:
        """Let lanes leave draining engines if there is another one."""
        states = {row.state for row in self.rows.values()}
        if "draining" in states and "ready" in states:
            for lane in self._lanes.values():
                self.leave(lane)

    def lost(self, event: ev.EngineLost) -> None:
        """An engine is lost; if its worker is lost too, its steps wait again."""
        row = self.rows.get(event.engine_id)
        if row is None:
            return
        if row.state != "lost":
            row.state = "lost"
            row.lost_s, row.lost_because = event.at, event.reason
            self._failures.count("engine", event.reason, event.at)
            self._forget_old(row)
        elif not (event.stranded and row.generating + row.queued):
            return
        for lane in self._lanes.values():
            if event.stranded and lane.engine is row:
                lane.engine, lane.generating = None, False
                self.stranded_steps += 1
                self._enter(lane, LLM_QUEUE, event.at)
            if lane.home is row:
                lane.has_kv = False
                if lane.engine is not row:
                    lane.move_home(None)
        if event.stranded:
            row.generating = row.queued = 0
        for move in list(self.moving.values()):
            if event.engine_id in (move.source, move.target):
                self._end_move(move, event.at, False, 0.0, 0)

    def _forget_old(self, row: EngineRow) -> None:
        self._lost.append(row.engine_id)
        if len(self._lost) > MOST_LOST:
            oldest = self.rows.get(self._lost[0])
            # An engine whose worker lives is lost before its steps report.
            if oldest is None or not oldest.generating + oldest.queued:
                self.rows.pop(self._lost.popleft(), None)

    # -- moves -------------------------------------------------------------------------------------

    def move_started(self, command: cmd.MoveContext, at: float) -> None:
        self.moving[command.trajectory_id] = OpenMove(
            command.trajectory_id, command.source_engine_id, command.target_engine_id, command.kind, at
        )
        counts = self.moves.setdefault(command.kind, MoveCounts())
        source = self.rows.get(command.source_engine_id)
        counts.started += 1
        counts.from_leaving += source is None or source.state != "ready"
        counts.running += 1
        lane = self._lanes.get(command.trajectory_id)
        if lane is not None:
            lane.moves += 1

    def move_ended(self, event: ev.MoveEnded) -> None:
        """A move has reported; a report of an earlier move changes nothing."""
        move = self.moving.get(event.trajectory_id)
        if move is None or move.target != event.target_engine_id:
            return
        if event.source_engine_id not in (None, move.source):
            return
        self._end_move(move, event.at, event.ok, event.seconds, event.tokens)
        if not event.ok:
            self._failures.count("move", event.cause or "unknown", event.at)

    def _end_move(self, move: OpenMove, at: float, ok: bool, seconds: float, tokens: int) -> None:
        del self.moving[move.trajectory_id]
        counts = self.moves[move.kind]
        counts.running -= 1
        counts.seconds += seconds
        counts.tokens += tokens
        counts.failed += not ok
        lane = self._lanes.get(move.trajectory_id)
        if lane is None:
            return
        target = self.rows.get(move.target)
        source = self.rows.get(move.source)
        if ok and target is not None and target.state == "ready":
            lane.move_home(target)
        elif lane.home is source and source is not None and source.state == "draining":
            lane.has_kv = False
            lane.move_home(None)
        if lane.step is not None and lane.engine is None:
            counts.exposed += 1
            counts.exposed_s += at - lane.requested_s
            self._enter(lane, LLM_QUEUE, at)

    @property
    def moves_started(self) -> int:
        return sum(counts.started for counts in self.moves.values())

    # -- series ------------------------------------------------------------------------------------

    def sums(self) -> tuple[int, int, int]:
        """Slots, context tokens and KV capacity over the engines that are not lost."""
        slots = resident = capacity = 0
        for row in self.rows.values():
            if row.state in LIVING:
                slots += row.slots
                resident += row.resident_tokens
                capacity += row.kv_capacity_tokens
        return slots, resident, capacity

    def sample(self, columns: dict[Any, array[Any]]) -> None:
        """Append one number to every column of an engine, zeros for one that is forgotten."""
        by_index = {row.index: row for row in self.rows.values()}
        for index in self.charted:
            row = by_index.get(index)
            numbers = (0, 0, 0) if row is None else (row.generating, row.queued, row.resident_tokens)
            for what, number in zip(_CHARTED, numbers, strict=True):
                columns[index, what].append(number)
