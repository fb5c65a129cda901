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
- One writer: the file is locked (`locks`), on file systems that machines share by a lease.
- `Compaction` replaces the file by one without records that are no longer needed. The new file is complete and on disk
  before it takes the name: at any moment the name is that of a whole journal.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.records.journal_lines import HEADER, JournalRecord, lines_after, parsed_record, read_header, scan_lines
from heddle_dask.records.locks import WriterLock, lock_or_refuse
from heddle_dask.records.synced_store import sync_path

# Above this size `append` flushes by itself, which bounds the memory of a caller that never flushes.
_BUFFER_BYTES = 4 << 20

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Journal:
    """The writer of a journal. Make one with `create` or `open_append`; close it, or use it in a `with`.

    Not thread-safe. There is no background flush: records that were appended but not flushed are lost with the object.
    """

    def __init__(self, path: Path, lock: WriterLock, last_crc: int) -> None:
        self.path = path
        self._lock = lock
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
            read_header(path)
        is_new = not path.exists()
        lock = _open_locked(path, os.O_CREAT)
        os.fchmod(lock.descriptor, 0o600)  # an older journal may be readable by others
        os.ftruncate(lock.descriptor, 0)
        try:
            return cls._begin(path, lock)
        except BaseException:
            if is_new:
                path.unlink()
            raise

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
        lock = _open_locked(path, 0)
        try:
            end, crc = 0, 0
            for line in scan_lines(path):
                end, crc = line.end, line.crc
            os.ftruncate(lock.descriptor, end)
            _aside(path).unlink(missing_ok=True)  # of a compaction that was killed
        except BaseException:
            lock.release()
            raise
        if end == 0:  # the writer was killed while writing the header
            return cls._begin(path, lock)
        return cls(path, lock, crc)

    @classmethod
    def _begin(cls, path: Path, lock: WriterLock) -> Journal:
        journal = cls(path, lock, zlib.crc32(HEADER))
        journal._buffer += HEADER
        try:
            journal.flush()
        except BaseException:
            journal.abandon()
            raise
        return journal

    def append(self, kind: str, body: dict[str, Any]) -> int:
        """Add one record to the buffer; it is not safe before `flush`.

        Returns
        -------
        int
            Length of its line in bytes.

        Raises
        ------
        TypeError
            If the body cannot be encoded as JSON. The journal is then unchanged.
        """
        return self._append(_encode([kind, body]).encode("ascii"))

    def _append(self, text: bytes) -> int:
        self._last_crc = crc = zlib.crc32(text, self._last_crc)
        line = b"%08x %b\n" % (crc, text)
        self._buffer += line
        if len(self._buffer) > _BUFFER_BYTES:
            self.flush()
        return len(line)

    @property
    def size_bytes(self) -> int:
        """Length of the file, what is not flushed included."""
        return os.fstat(self._lock.descriptor).st_size + len(self._buffer)

    def flush(self) -> None:
        """Hand everything appended so far to the kernel.

        Raises
        ------
        OSError
            If writing fails, or another process has become the writer. The unwritten data is kept, and the next
            flush continues with it.
        """
        if self._buffer:
            self._lock.check()
        while self._buffer:
            written = os.write(self._lock.descriptor, self._buffer)
            del self._buffer[:written]

    def sync(self) -> None:
        """Flush, and wait until the data is on disk (milliseconds)."""
        self.flush()
        os.fsync(self._lock.descriptor)

    def close(self) -> None:
        """Flush, unlock and close. A second close does nothing."""
        if self._lock.descriptor < 0:
            return
        self.flush()
        self._lock.release()

    def abandon(self) -> None:
        """Unlock and close without writing what is buffered: after a flush that failed."""
        self._buffer.clear()
        self.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Compaction:
    """Replaces the file of an open journal by one without the records that are no longer needed.

    `copy` may run in a thread while the journal is appended to; `finish` belongs to the thread that appends.

    Parameters
    ----------
    is_needed
        Asked for each record of one of `kinds`; records of other kinds are kept.
    """

    def __init__(self, journal: Journal, kinds: Collection[str], is_needed: Callable[[JournalRecord], bool]) -> None:
        journal.flush()
        self._journal = journal
        self._lines = scan_lines(journal.path)
        self._end = next(self._lines)  # the file is open, and its length is taken
        self._prefixes = _prefixes(kinds)
        self._is_needed = is_needed
        aside = _aside(journal.path)
        aside.unlink(missing_ok=True)
        self._copy = Journal.create(aside)

    def copy(self) -> None:
        """Write the needed records to a file beside the journal; takes about a second for 300 MB.

        Raises
        ------
        OSError
            The new file cannot be written. The journal is as it was.
        """
        with self._removed_on_failure():
            for line in self._lines:
                self._end = line
                asked = line.text.startswith(self._prefixes)
                if not asked or self._is_needed(parsed_record(line, self._journal.path)):
                    self._copy._append(line.text)
            self._copy.sync()

    def finish(self) -> None:
        """Add what was appended meanwhile, and give the new file the name of the journal.

        Raises
        ------
        OSError
            As `copy`.
        """
        journal, copy = self._journal, self._copy
        with self._removed_on_failure():
            journal.flush()
            for line in lines_after(journal.path, self._end):
                copy._append(line.text)
            copy.sync()
            os.replace(copy.path, journal.path)
        journal._lock.adopt(copy._lock)
        journal._last_crc = copy._last_crc
        sync_path(journal.path.parent)

    @contextlib.contextmanager
    def _removed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._copy.abandon()
            self._copy.path.unlink(missing_ok=True)
            raise


class JournalReader:
    """Iterates over the complete records of a journal, one at a time, also while it is being written.

    The file is opened at once: records that a compaction drops later are still read.

    Parameters
    ----------
    kinds
        Records of other kinds are skipped, almost without cost. None: all.

    Attributes
    ----------
    dropped_bytes
        Length of the torn tail, once the iteration has ended.

    Raises
    ------
    BadInput
        The file is missing, unreadable, no journal; while iterating: damaged before its end (names the line).
    """

    def __init__(self, path: str | Path, kinds: Collection[str] | None = None) -> None:
        self.path = Path(path)
        self.dropped_bytes = 0
        self._prefixes = None if kinds is None else _prefixes(kinds)
        self._lines = scan_lines(self.path)
        self._header = next(self._lines)

    def __iter__(self) -> Iterator[JournalRecord]:
        end = self._header.end
        for line in self._lines:
            end = line.end
            if self._prefixes is None or line.text.startswith(self._prefixes):
                yield parsed_record(line, self.path)
        self.dropped_bytes = self._header.size - end


def _prefixes(kinds: Collection[str]) -> tuple[bytes, ...]:
    return tuple(_encode([kind])[:-1].encode("ascii") + b"," for kind in kinds)


def _open_locked(path: Path, flags: int) -> WriterLock:
    try:
        if flags & os.O_CREAT:
            path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
            lock = lock_or_refuse(descriptor, path)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return lock
            lock.release()  # a compaction has replaced the file in between
    except OSError as error:
        raise BadInput(f"cannot write the journal {path}: {error.strerror}") from None


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
