"""Encodes a trace in Perfetto's own format: protocol buffers, `Trace` of `TracePacket`, with `TrackEvent`.

Written by hand: a dozen fields need no library. The field numbers are those of ``perfetto_trace.proto``; the tests
parse the result with Perfetto's classes. Names of events are interned.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum

# One writer, one sequence; its first packet clears the state of interned names.
_SEQUENCE = 1
_CLEARED, _NEEDED = 1, 2
_VARINT, _FIXED64, _BYTES = 0, 1, 2

_SMALL = [bytes([value]) for value in range(0x80)]

Value = str | int | float


class Kind(IntEnum):
    """`TrackEvent.Type`."""

    BEGIN = 1
    END = 2
    INSTANT = 3
    COUNTER = 4


class Order(IntEnum):
    """`TrackDescriptor.ChildTracksOrdering`."""

    LEXICOGRAPHIC = 1
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
        order: Order | None = None,
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
        """The innermost slice of the track ends."""
        body = self._ends.get(track)
        if body is None:
            body = self._ends[track] = _message(11, _number(9, Kind.END) + _number(11, track))
        self._packet(body, at_ns)

    def instant(self, track: int, at_ns: int, name: str) -> None:
        """Something happens that takes no time."""
        interned = bytearray()
        number = self._interned(self._names, 2, name, interned)
        body = _number(9, Kind.INSTANT) + _number(11, track) + _number(10, number)
        self._packet((_message(12, interned) if interned else b"") + _message(11, body), at_ns)

    def count(self, track: int, at_ns: int, value: int) -> None:
        """A counter has this value from here on."""
        body = _number(9, Kind.COUNTER) + _number(11, track) + _number(30, value)
        self._packet(_message(11, body), at_ns)

    def encoded(self) -> bytes:
        """The file."""
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
    """The value of a `DebugAnnotation`."""
    if isinstance(value, str):
        return _text(6, value)
    if isinstance(value, float):
        return _tag(5, _FIXED64) + struct.pack("<d", value)
    return _number(4, value)


# What every packet has: its sequence, and that it needs the names that earlier packets have introduced.
_HEAD = _number(10, _SEQUENCE) + _number(13, _NEEDED)
_FIRST_HEAD = _number(10, _SEQUENCE) + _number(13, _NEEDED | _CLEARED)
