"""The lines of a journal file: how they are read and checked. `records.journal` describes the format."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from heddle_dask.core.errors import BadInput
from heddle_dask.core.plain_files import open_plain
from heddle_dask.records.trajectory import TRAJECTORY_FINISHED

# Version of this file format and of the events and commands in it (`core.journal_codec`); incremented when either
# changes.
FORMAT = 5
HEADER = b'{"heddle":"journal","format":%d}\n' % FORMAT
_ANY_HEADER = re.compile(rb'\{"heddle":"journal","(?:format|version)":(\d+)\}\n')

_READ_BYTES = 1 << 20
# Far above what the budget of an action lets through, and below what a sparse file may claim.
_MOST_LINE_BYTES = 1 << 29
_LINE_EXTRA = len("01234567 \n")


GATEWAY_OPENED = "gateway-opened"
"""Kind of the record that an agent of its own asks for the steps of a trajectory from now on."""
RESULTS = frozenset(
    {
        "step",
        "step-cancelled",
        "step-lost",
        "action",
        "reward",
        "environment-failed",
        GATEWAY_OPENED,
        TRAJECTORY_FINISHED,
    }
)
"""Kinds of records that are of one trajectory, and needed until the store has it."""


class JournalRecord(NamedTuple):
    """One record of a journal; `size_bytes` is the length of its line."""

    kind: str
    body: dict[str, Any]
    size_bytes: int


class JournalLine(NamedTuple):
    """A line of a journal whose CRC is right, and the place of its end."""

    text: bytes  # the JSON; empty for the header
    crc: int
    end: int  # bytes of the file up to and including this line
    size: int  # bytes of the file when it was opened


def scan_lines(path: Path) -> Iterator[JournalLine]:
    """The header and every complete record; ends before a torn tail, raises at damage.

    Yields at least one line: for a file that ends within the header an empty one at byte 0.
    """
    header = read_header(path)
    with open_plain(path, _READ_BYTES) as file:
        # Read only the present bytes: with an active writer the file grows meanwhile.
        size = os.fstat(file.fileno()).st_size
        if header != HEADER:
            yield JournalLine(b"", 0, 0, size)
            return
        begin = JournalLine(b"", zlib.crc32(HEADER), len(HEADER), size)
        yield begin
        yield from _lines_of(file, path, begin)


def lines_after(path: Path, last: JournalLine) -> Iterator[JournalLine]:
    """The complete records that were appended after one."""
    with open_plain(path, _READ_BYTES) as file:
        size = os.fstat(file.fileno()).st_size
        yield from _lines_of(file, path, last._replace(size=size))


def _lines_of(file: BinaryIO, path: Path, last: JournalLine) -> Iterator[JournalLine]:
    file.seek(last.end)
    number = 1
    _, crc, end, size = last
    while end < size:
        number += 1
        line, length = _read_line(file, min(size - end, _MOST_LINE_BYTES))
        text = _checked(line, crc)
        if text is None:
            if end + length < size:
                raise BadInput(
                    f"{path} is damaged at line {number}: restore it, or keep what is whole with: head -n {number - 1}"
                )
            return
        end, crc = end + len(line), int(line[:8], 16)
        yield JournalLine(text, crc, end, size)


def _read_line(file: BinaryIO, most: int) -> tuple[bytes, int]:
    """A line and its length; with a zero in it, such as in the hole of a sparse file, it is none and not kept."""
    parts: list[bytes] = []
    length, is_text = 0, True
    while length < most:
        part = file.readline(min(most - length, _READ_BYTES))
        length += len(part)
        is_text = is_text and b"\0" not in part
        if is_text:
            parts.append(part)
        else:
            parts.clear()
        if not part or part.endswith(b"\n"):
            break
    return b"".join(parts), length


def _checked(line: bytes, previous_crc: int) -> bytes | None:
    if line[8:9] != b" " or line[-1:] != b"\n":
        return None
    text = line[9:-1]
    return text if line[:8] == b"%08x" % zlib.crc32(text, previous_crc) else None


def read_header(path: Path) -> bytes:
    """The written part of the header; refuses files that are no journal, and journals of another format."""
    try:
        with open_plain(path) as file:
            line = file.readline(2 * len(HEADER))
    except OSError as error:
        raise BadInput(f"cannot read the journal {path}: {error.strerror}") from None
    if HEADER.startswith(line):
        return line
    other = _ANY_HEADER.match(line)
    if other is None:
        raise BadInput(f"{path} is no journal of heddle: give another path")
    raise BadInput(
        f"the journal {path} has format {int(other[1])}, this version reads format {FORMAT}: use the version of "
        "heddle_dask that wrote it, or give another path"
    )


# What every reader of these entries relies on, in a record of any kind.
_ENTRIES: dict[str, type] = {"trajectory_id": str, "branch": str, "step_index": int, "action_index": int}
_ENTRIES |= {"lines": list, "strategy": str, "seed": int, "overrides": list, "retries": dict}


def _has_types(body: dict[str, Any]) -> bool:
    return all(isinstance(body[name], _ENTRIES[name]) for name in _ENTRIES.keys() & body.keys())


def parsed_record(line: JournalLine, path: Path) -> JournalRecord:
    """The record of a line whose CRC is right."""
    try:
        kind, body = json.loads(line.text)
        if isinstance(kind, str) and isinstance(body, dict) and _has_types(body):
            return JournalRecord(kind, body, len(line.text) + _LINE_EXTRA)
    except (ValueError, TypeError, RecursionError):
        pass
    raise BadInput(f"{path} has a line that heddle did not write, at byte {line.end - len(line.text)}: restore it")
