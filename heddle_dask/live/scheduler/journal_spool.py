"""The controller's journal since it began, on the scheduler's disk: a run that joins later needs it for its replay."""

from __future__ import annotations

import logging
import tempfile
import zlib
from typing import IO, Any

import msgpack

# Rows are compressed in blocks of this many.
BLOCK_ROWS = 512
# A controller may live for weeks; what comes after is counted and not kept.
SPOOL_BYTES = 1 << 30

_LOG = logging.getLogger(__name__)


class JournalSpool:
    """An anonymous file of rows; it ends with its process."""

    def __init__(self) -> None:
        self.rows = 0  # number of rows so far
        self._file: IO[bytes] | None = None
        self._blocks: list[tuple[int, int]] = []  # offset and bytes
        self._kept = 0
        self._open: list[Any] = []
        self._is_full = False

    def append(self, row: Any) -> None:
        """Keep one row; once the file is full, or cannot be written, it is only counted."""
        self.rows += 1
        if self._is_full:
            return
        self._open.append(row)
        if len(self._open) == BLOCK_ROWS:
            self._write()

    def _write(self) -> None:
        block = zlib.compress(msgpack.packb(self._open), 1)
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115
            offset = self._file.seek(0, 2)
            self._file.write(block)
        except OSError as error:
            _LOG.warning("the journal of the cluster is not kept any more for runs that join: %s", error)
            self._is_full = True
            return
        self._blocks.append((offset, len(block)))
        self._kept += len(self._open)
        self._open = []
        self._is_full = offset + len(block) >= SPOOL_BYTES

    def history(self) -> SpoolReader:
        """A reader of the rows up to now."""
        return SpoolReader(self, len(self._blocks), list(self._open), self.rows)

    def block(self, number: int) -> list[Any]:
        """The rows of one block; raises OSError."""
        assert self._file is not None
        offset, size = self._blocks[number]
        self._file.seek(offset)
        rows: list[Any] = msgpack.unpackb(zlib.decompress(self._file.read(size)), strict_map_key=False)
        return rows

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._is_full = True


class SpoolReader:
    """Reads what a spool held at one moment, some rows at a time."""

    def __init__(self, spool: JournalSpool, blocks: int, last: list[Any], rows: int) -> None:
        self._spool = spool
        self._blocks = blocks
        self._last = last
        self._next = 0
        self._left = rows
        self.missing = 0  # rows that were not kept, or could not be read
        # `has_begun`, `ended`: whether something was read, and whether that was all.
        self.has_begun = False
        self.ended = False

    def read(self) -> list[Any]:
        """The next rows; empty at the end."""
        self.has_begun = True
        if self.ended:
            return []
        try:
            rows = self._spool.block(self._next) if self._next < self._blocks else self._last
        except (OSError, AssertionError, ValueError):
            rows = []
            self._next = self._blocks
        self.ended = self._next >= self._blocks
        self._next += 1
        self._left -= len(rows)
        if self.ended:
            self.missing = self._left
        return rows
