"""A run as a trace: engines with their slots, trajectories, actions, counters, and moves as flows between slots.

It is encoded in Perfetto's own format: protocol buffers, `Trace` of `TracePacket`, with `TrackEvent`. Written by hand:
a dozen fields need no library. The field numbers are those of ``perfetto_trace.proto``; the tests parse the result with
Perfetto's classes. Names of events are interned.
"""

from __future__ import annotations

import heapq
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from heddle_dask.records.trajectory import StepRecord, TrajectoryOutline
from heddle_dask.views.accounts import NS_PER_S, PHASE_TITLE, Account, work_began_s, worked_here
from heddle_dask.views.report.run_charts import RunAxis
from heddle_dask.views.report.run_figures import Axis, RunFigures

# One writer, one sequence; its first packet clears the state of interned names.
_SEQUENCE = 1
_CLEARED, _NEEDED = 1, 2
_VARINT, _FIXED64, _BYTES = 0, 1, 2

_SMALL = [bytes([value]) for value in range(0x80)]

Value = str | int | float


class Kind(IntEnum):
    BEGIN = 1
    END = 2
    INSTANT = 3
    COUNTER = 4


class TrackOrder(IntEnum):
    EXPLICIT = 3


class PerfettoTrace:
    """Builds a trace; times are nanoseconds, and events of one track go in in order of time."""

    def __init__(self) -> None:
        self._out = bytearray()
        self._names: dict[str, int] = {}
        self._argument_names: dict[str, int] = {}
        self._tracks = 0
        self._ends: dict[int, bytes] = {}
        self._is_first = True

    def track(
        self,
        name: str,
        parent: int = 0,
        *,
        rank: int = 0,
        order: TrackOrder | None = None,
        counter: str | None = None,
    ) -> int:
        """Add a track below another; returns its number.

        Parameters
        ----------
        rank
            Place among its siblings, where the parent orders them explicitly.
        order
            How its own children are ordered.
        counter
            Unit of a counter track; None for a track of slices.
        """
        self._tracks += 1
        body = _number(1, self._tracks) + _text(2, name)
        if parent:
            body += _number(5, parent)
        if counter is not None:
            body += _message(8, _text(6, counter))
        if order is not None:
            body += _number(11, order)
        if rank:
            body += _number(12, rank)
        self._packet(_message(60, body), None)
        return self._tracks

    def begin(
        self,
        track: int,
        at_ns: int,
        name: str,
        arguments: Mapping[str, Value] | None = None,
        flows: Iterable[int] = (),
        ended_flows: Iterable[int] = (),
    ) -> None:
        """A slice begins; a flow connects slices of the same number, in order of time."""
        interned = bytearray()
        body = bytearray(_number(9, Kind.BEGIN) + _number(11, track))
        body += _number(10, self._interned(self._names, 2, name, interned))
        for key, value in (arguments or {}).items():
            number = self._interned(self._argument_names, 3, key, interned)
            body += _message(4, _number(1, number) + _value(value))
        for flow in flows:
            body += _tag(47, _FIXED64) + struct.pack("<Q", flow)
        for flow in ended_flows:
            body += _tag(48, _FIXED64) + struct.pack("<Q", flow)
        self._packet((_message(12, interned) if interned else b"") + _message(11, body), at_ns)

    def end(self, track: int, at_ns: int) -> None:
        body = self._ends.get(track)
        if body is None:
            body = self._ends[track] = _message(11, _number(9, Kind.END) + _number(11, track))
        self._packet(body, at_ns)

    def instant(self, track: int, at_ns: int, name: str) -> None:
        interned = bytearray()
        number = self._interned(self._names, 2, name, interned)
        body = _number(9, Kind.INSTANT) + _number(11, track) + _number(10, number)
        self._packet((_message(12, interned) if interned else b"") + _message(11, body), at_ns)

    def count(self, track: int, at_ns: int, value: int) -> None:
        body = _number(9, Kind.COUNTER) + _number(11, track) + _number(30, value)
        self._packet(_message(11, body), at_ns)

    def encoded(self) -> bytes:
        return bytes(self._out)

    def _packet(self, body: bytes, at_ns: int | None) -> None:
        time = b"" if at_ns is None else b"\x40" + _varint(at_ns)
        head = _FIRST_HEAD if self._is_first else _HEAD
        self._is_first = False
        self._out += b"\x0a" + _varint(len(time) + len(head) + len(body)) + time + head + body

    @staticmethod
    def _interned(known: dict[str, int], place: int, name: str, new: bytearray) -> int:
        """Number of a name; one that is new is added to what this packet introduces."""
        number = known.get(name)
        if number is None:
            number = known[name] = len(known) + 1
            new += _message(place, _number(1, number) + _text(2, name))
        return number


def _varint(value: int) -> bytes:
    if 0 <= value < 0x80:
        return _SMALL[value]
    out = bytearray()
    value &= 0xFFFF_FFFF_FFFF_FFFF  # negative numbers as two's complement
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _tag(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _number(field: int, value: int) -> bytes:
    return _tag(field, _VARINT) + _varint(value)


def _message(field: int, body: bytes | bytearray) -> bytes:
    return _tag(field, _BYTES) + _varint(len(body)) + bytes(body)


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode("utf-8", "replace"))


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return _text(6, value)
    if isinstance(value, float):
        return _tag(5, _FIXED64) + struct.pack("<d", value)
    return _number(4, value)


# What every packet has: its sequence, and that it needs the names that earlier packets have introduced.
_HEAD = _number(10, _SEQUENCE) + _number(13, _NEEDED)
_FIRST_HEAD = _number(10, _SEQUENCE) + _number(13, _NEEDED | _CLEARED)


@dataclass(slots=True)
class _Slice:
    start_ns: int
    stop_ns: int
    name: str
    arguments: dict[str, Value]
    flow: int = 0
    ended_flow: int = 0


@dataclass(frozen=True, slots=True)
class _Held:
    """Context tokens that an engine holds for a trajectory."""

    start_ns: int
    stop_ns: int
    tokens: int


class RunTrace:
    """Feed it with each record and its account; `encoded` once `figures` has them all."""

    def __init__(self, figures: RunFigures) -> None:
        self._figures = figures
        self._taken: list[tuple[TrajectoryOutline, Account]] = []

    def add(self, record: TrajectoryOutline, account: Account) -> None:
        self._taken.append((record, account))

    def encoded(self) -> bytes:
        """The trace as a file of Perfetto; trajectories whose session is unknown are left out."""
        run_axis = RunAxis(self._figures)
        axis = run_axis.axis
        placed = [
            (record, account, row.session)
            for (record, account), row in zip(self._taken, self._figures.rows, strict=True)
            if row.session is not None and row.session in axis.begins_s
        ]
        out = PerfettoTrace()
        self._counters(out, placed, axis)
        self._engines(out, placed, axis)
        _actions(out, placed, axis)
        _trajectories(out, placed, axis)
        events = out.track("Events", rank=5)
        for mark in sorted(run_axis.marks(), key=lambda mark: mark.at_s):
            out.instant(events, round(mark.at_s * NS_PER_S), mark.text)
        return out.encoded()

    def _counters(self, out: PerfettoTrace, placed: _Placed, axis: Axis) -> None:
        live = out.track("Live trajectories", counter="trajectories", rank=1)
        spans = [(_ns(axis, s, r.started_s), _ns(axis, s, r.finished_s), 1) for r, _, s in placed]
        _count(out, live, spans)

    def _engines(self, out: PerfettoTrace, placed: _Placed, axis: Axis) -> None:
        slices: dict[str, list[_Slice]] = {}
        held: dict[str, list[_Held]] = {}
        flows = 0
        for record, _, session in placed:
            last: dict[int, tuple[StepRecord, _Slice]] = {}
            for step in record.steps:
                if not worked_here(step):
                    continue
                piece = _step_slice(record, step, session, axis)
                slices.setdefault(step.engine_id, []).append(piece)
                before = last.get(step.branch)
                if before is not None:
                    _hold(held, before[0], _ns(axis, session, step.submitted_s), axis, session)
                    if before[0].engine_id != step.engine_id:
                        flows += 1
                        before[1].flow = piece.ended_flow = flows
                last[step.branch] = step, piece
            for step, _ in last.values():
                _hold(held, step, _ns(axis, session, record.finished_s), axis, session)
        top = out.track("Engines", order=TrackOrder.EXPLICIT, rank=2)
        for number, engine_id in enumerate(sorted(slices), start=1):
            engine = out.track(engine_id, top, order=TrackOrder.EXPLICIT, rank=number)
            kv = out.track("context tokens held", engine, counter="tokens", rank=1)
            _count(out, kv, [(each.start_ns, each.stop_ns, each.tokens) for each in held.get(engine_id, ())])
            _lanes(out, engine, "slot", slices[engine_id])


_Placed = list[tuple[TrajectoryOutline, Account, int]]


def _ns(axis: Axis, session: int, seconds: float) -> int:
    return max(0, round(axis.at(session, seconds) * NS_PER_S))


def _step_slice(record: TrajectoryOutline, step: StepRecord, session: int, axis: Axis) -> _Slice:
    arguments: dict[str, Value] = {
        "trajectory": record.trajectory_id,
        "step": step.step_index,
        "branch": step.branch,
        "prompt_tokens": step.prompt_tokens,
        "cached_tokens": step.cached_tokens,
        "generated_tokens": step.generated_tokens,
        "finish_reason": step.finish_reason,
        "preemptions": step.preemptions,
    }
    name = f"{record.trajectory_id} step {step.step_index}"
    return _Slice(_ns(axis, session, work_began_s(step)), _ns(axis, session, step.finished_s), name, arguments)


def _hold(held: dict[str, list[_Held]], step: StepRecord, until_ns: int, axis: Axis, session: int) -> None:
    tokens = step.prompt_tokens + step.generated_tokens
    held.setdefault(step.engine_id, []).append(_Held(_ns(axis, session, step.submitted_s), until_ns, tokens))


def _lanes(out: PerfettoTrace, parent: int, name: str, slices: list[_Slice]) -> None:
    """Slices that may overlap, each in the first lane that is free: slices of one track must nest."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    tracks: list[int] = []
    lane_of: list[list[_Slice]] = []
    for piece in sorted(slices, key=lambda each: (each.start_ns, each.stop_ns)):
        while busy and busy[0][0] <= piece.start_ns:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane = len(lane_of)
            lane_of.append([])
            tracks.append(out.track(f"{name} {lane}", parent, rank=lane + 2))
        heapq.heappush(busy, (max(piece.stop_ns, piece.start_ns + 1), lane))
        lane_of[lane].append(piece)
    for track, mine in zip(tracks, lane_of, strict=True):
        for piece in mine:
            flows, ended = (
                ([piece.flow] if piece.flow else []),
                ([piece.ended_flow] if piece.ended_flow else []),
            )
            out.begin(track, piece.start_ns, piece.name, piece.arguments, flows, ended)
            out.end(track, piece.stop_ns)


def _actions(out: PerfettoTrace, placed: _Placed, axis: Axis) -> None:
    slices = []
    for record, _, session in placed:
        for action in record.actions:
            if math.isnan(action.run_s) or math.isnan(action.finished_s) or not worked_here(action):
                continue
            arguments: dict[str, Value] = {
                "trajectory": record.trajectory_id,
                "kind": action.kind,
                "status": action.status,
                "cpus": action.cpus,
                **{
                    f"{name}_s": 0.0 if math.isnan(seconds) else seconds
                    for name, seconds in (
                        ("queue", action.queue_s),
                        ("quota", action.quota_s),
                        ("load", action.load_s),
                    )
                },
            }
            start, stop = (_ns(axis, session, each) for each in (action.finished_s - action.run_s, action.finished_s))
            slices.append(_Slice(start, stop, action.label, arguments))
    if slices:
        _lanes(out, out.track("Actions", order=TrackOrder.EXPLICIT, rank=3), "action", slices)


def _trajectories(out: PerfettoTrace, placed: _Placed, axis: Axis) -> None:
    top = out.track("Trajectories", order=TrackOrder.EXPLICIT, rank=4)
    ordered = sorted(placed, key=lambda each: axis.at(each[2], each[0].started_s))
    for rank, (record, account, session) in enumerate(ordered, start=1):
        if not account.segments:
            continue
        track = out.track(record.trajectory_id, top, rank=rank)
        shift_ns = round(axis.at(session, 0.0) * NS_PER_S)
        arguments: dict[str, Value] = {
            "status": record.status,
            "cause": record.cause,
            "tokens": record.generated_tokens,
            "steps": len(record.steps),
        }
        if record.reward is not None:
            arguments["reward"] = record.reward
        out.begin(track, max(0, account.segments[0].start_ns + shift_ns), record.trajectory_id, arguments)
        for start, stop, phase in account.segments:
            out.begin(track, max(0, start + shift_ns), PHASE_TITLE[phase])
            out.end(track, max(0, stop + shift_ns))
        out.end(track, max(0, account.segments[-1].stop_ns + shift_ns))


def _count(out: PerfettoTrace, track: int, spans: Iterable[tuple[int, int, int]]) -> None:
    changes: dict[int, int] = {}
    for start, stop, weight in spans:
        if stop > start:
            changes[start] = changes.get(start, 0) + weight
            changes[stop] = changes.get(stop, 0) - weight
    value = 0
    for at in sorted(changes):
        value += changes[at]
        out.count(track, at, value)
