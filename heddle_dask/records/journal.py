"""The journal: an append-only file of (kind, body) records, one file per run, from which a run is recovered.

A header line with the format number, then one line per record, ``CRC JSON\\n``: eight hexadecimal digits and
``["kind", {body}]``. The CRC-32 of a line starts from the CRC of the line before it, which detects changed, lost,
repeated and moved lines. The JSON is Python's: nan and infinities are written as ``NaN`` and ``Infinity``.

Promises:

- A record is complete or absent. A process killed during a write leaves a *torn tail*: a last line that fails its CRC.
  Readers drop it and report its length; opening for append removes it. Any other failed CRC is damage and is refused
  with its line number.
- `append` only buffers. After `flush` the data is in the kernel and survives the death of this process by any signal.
  After `sync` it survives a crash of the machine.
- The file is made with mode 0600: it holds all prompts and outputs.
- One writer: the file is locked (`flock`) if the file system supports locks.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from heddle_dask.core.errors import BadInput
from heddle_dask.records.locks import lock_or_refuse

# Version of this file format and of the events and commands in it (`core.journal_codec`); incremented when either
# changes.
FORMAT = 4
HEADER = b'{"heddle":"journal","format":%d}\n' % FORMAT
_ANY_HEADER = re.compile(rb'\{"heddle":"journal","(?:format|version)":(\d+)\}\n')

# Above this size `append` flushes by itself, which bounds the memory of a caller that never flushes.
_BUFFER_BYTES = 4 << 20
_READ_BYTES = 1 << 20

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class JournalRecords(list[tuple[str, dict[str, Any]]]):
    """The complete records of a journal, in order; `dropped_bytes` is the length of its torn tail."""

    dropped_bytes: int = 0


class Journal:
    """The writer of a journal. Make one with `create` or `open_append`; close it, or use it in a `with`.

    Not thread-safe. There is no background flush: records that were appended but not flushed are lost with the object.
    """

    def __init__(self, path: Path, descriptor: int, last_crc: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._last_crc = last_crc
        self._buffer = bytearray()

    @classmethod
    def create(cls, path: str | Path, overwrite: bool = False) -> Journal:
        """Begin a new, empty journal.

        Raises
        ------
        BadInput
            If the path exists (with `overwrite`: exists and is no journal), is locked by another
            process, or cannot be written.
        """
        path = Path(path)
        if path.exists() or path.is_symlink():
            if not overwrite:
                raise BadInput(f"{path} exists: choose another path, append to it or overwrite it")
            _scan_header(path)
        descriptor = _open_locked(path, os.O_CREAT)
        os.fchmod(descriptor, 0o600)  # an older journal may be readable by others
        os.ftruncate(descriptor, 0)
        return cls._begin(path, descriptor)

    @classmethod
    def open_append(cls, path: str | Path) -> Journal:
        """Open an existing journal for appending after its last complete record; a torn tail is removed.

        Raises
        ------
        BadInput
            If the file is missing, no journal, damaged before its end, locked by another process,
            or cannot be written.
        """
        path = Path(path)
        descriptor = _open_locked(path, 0)
        try:
            end, crc = 0, 0
            for line in _scan(path):
                end, crc = line.end, line.crc
            os.ftruncate(descriptor, end)
        except BaseException:
            os.close(descriptor)
            raise
        if end == 0:  # the writer was killed while writing the header
            return cls._begin(path, descriptor)
        return cls(path, descriptor, crc)

    @classmethod
    def _begin(cls, path: Path, descriptor: int) -> Journal:
        journal = cls(path, descriptor, zlib.crc32(HEADER))
        journal._buffer += HEADER
        journal.flush()
        return journal

    def append(self, kind: str, body: dict[str, Any]) -> None:
        """Add one record to the buffer; it is not safe before `flush`.

        Raises
        ------
        TypeError
            If the body cannot be encoded as JSON. The journal is then unchanged.
        """
        text = _encode([kind, body]).encode("ascii")
        self._last_crc = crc = zlib.crc32(text, self._last_crc)
        self._buffer += b"%08x %b\n" % (crc, text)
        if len(self._buffer) > _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand everything appended so far to the kernel.

        Raises
        ------
        OSError
            If writing fails. The unwritten data is kept, and the next flush continues with it.
        """
        while self._buffer:
            written = os.write(self._descriptor, self._buffer)
            del self._buffer[:written]

    def sync(self) -> None:
        """Flush, and wait until the data is on disk (milliseconds)."""
        self.flush()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Flush, unlock and close. A second close does nothing."""
        if self._descriptor < 0:
            return
        self.flush()
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_journal(path: str | Path) -> JournalRecords:
    """All complete records of the journal at `path`, also while it is being written.

    Returns
    -------
    JournalRecords
        A list of (kind, body), with the attribute `dropped_bytes`: length of the torn tail, or 0.

    Raises
    ------
    BadInput
        If the file is missing, unreadable, no journal, or damaged before its end (names the line).
    """
    path = Path(path)
    records = JournalRecords()
    end, size = 0, 0
    for line in _scan(path):
        end, size = line.end, line.size
        if line.text:
            kind, body = json.loads(line.text)
            records.append((kind, body))
    records.dropped_bytes = size - end
    return records


class _Line(NamedTuple):
    text: bytes  # the JSON, empty for the header
    crc: int
    end: int  # bytes of the file up to and including this line
    size: int  # bytes of the file when it was opened


def _scan(path: Path) -> Iterator[_Line]:
    """The header and every complete record; ends before a torn tail, raises at damage.

    Yields at least one line: for a file that ends within the header an empty one at byte 0.
    """
    header = _scan_header(path)
    with open(path, "rb", buffering=_READ_BYTES) as file:
        # Read only the present bytes: with an active writer the file grows meanwhile.
        size = os.fstat(file.fileno()).st_size
        if header != HEADER:
            yield _Line(b"", 0, 0, size)
            return
        file.seek(len(HEADER))
        end, crc = len(HEADER), zlib.crc32(HEADER)
        yield _Line(b"", crc, end, size)
        number = 1
        while end < size:
            number += 1
            line = file.readline(size - end)
            text = _checked(line, crc)
            if text is None:
                if end + len(line) < size:
                    raise BadInput(
                        f"{path} is damaged at line {number}: restore it, or keep what is whole "
                        f"with: head -n {number - 1}"
                    )
                return
            end, crc = end + len(line), int(line[:8], 16)
            yield _Line(text, crc, end, size)


def _checked(line: bytes, previous_crc: int) -> bytes | None:
    """The JSON of a line, or None if its CRC is wrong."""
    if line[8:9] != b" " or line[-1:] != b"\n":
        return None
    text = line[9:-1]
    return text if line[:8] == b"%08x" % zlib.crc32(text, previous_crc) else None


def _scan_header(path: Path) -> bytes:
    """The written part of the header; refuses files that are no journal, and journals of another format."""
    try:
        with open(path, "rb") as file:
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


def _open_locked(path: Path, flags: int) -> int:
    try:
        if flags & os.O_CREAT:
            path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        raise BadInput(f"cannot write the journal {path}: {error.strerror}") from None
    lock_or_refuse(descriptor, path)
    return descriptor
