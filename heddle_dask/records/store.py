"""Writing a run: whole trajectories, appended in batches, committed by one attribute.

Crash safety without a log: rows are appended after the committed ones, zarr replaces files atomically (write, then
rename), and the row counts in `committed` change last, in one file. A writer that is killed at any point leaves the
committed rows unchanged; `RunStore.append_to` removes the rows after them. The lost trajectories are in the journal,
and `recover` appends them. Every file of an append is on disk before the row counts change: so this holds for a crash
of the machine, too, and what is committed may be dropped from the journal.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec

from heddle_dask.core.errors import BadInput, encodable_text
from heddle_dask.records.journal import JournalReader
from heddle_dask.records.locks import WriterLock, lock_or_refuse
from heddle_dask.records.reader import RunReader, RunSummary
from heddle_dask.records.rows import Rows, to_rows
from heddle_dask.records.schema import (
    ATTRIBUTES_CRC,
    COLUMNS_ADDED,
    FORMAT,
    FORMAT_VERSION,
    LATER_COLUMNS,
    TABLES,
    absent_value,
    attributes_crc,
    committed_rows,
    is_ours,
    missing_columns,
    open_column,
    open_run,
    read_rows,
)
from heddle_dask.records.synced_store import SyncedStore
from heddle_dask.records.trajectory import TRAJECTORY_FINISHED, TrajectoryRecord, trajectory_from_body

__all__ = ["RunReader", "RunStore", "RunSummary", "recover"]

# Bounds the memory of a recovery.
_RECOVERED_AT_ONCE = 64


class RunStore:
    """The writer of a run. Make one with `create` or `append_to`; close it, or use `with`.

    One append takes about 0.1 s for any number from 1 to 64 trajectories (it writes every column), so append in
    batches, and from a thread if there is an event loop. Thread-safe: writes wait for each other; `in` and `len` do
    not wait.
    """

    _group: zarr.Group
    _columns: dict[str, dict[str, zarr.Array[Any]]]
    _rows: dict[str, int]  # committed
    _ids: set[str]  # ids of committed trajectories, for membership tests
    _in_doubt: bool  # an append failed: memory and disk may differ

    def __init__(self, group: zarr.Group, lock: WriterLock | None = None) -> None:
        """Take over an open run: truncate it to its committed rows.

        Use `create` or `append_to`, unless the run is in a zarr store that is no directory.

        Raises
        ------
        BadInput
            If the run is damaged.
        """
        self._lock = lock
        self._writing = threading.RLock()
        self._adopt(group)

    @classmethod
    def create(cls, path: str | Path, metadata: Mapping[str, Any], overwrite: bool = False) -> RunStore:
        """Make an empty run.

        Parameters
        ----------
        metadata
            JSON-able facts about the run: environment, model, strategy, seed, versions, command line.
        overwrite
            Replace a run of this package, or use an empty directory; anything else is refused.

        Raises
        ------
        BadInput
            If the path exists (with `overwrite`: is neither a run nor empty), is being written by
            another process, or cannot be written.
        """
        path = Path(path)
        facts = json.loads(json.dumps(dict(metadata)))
        lock = _make_directory(path, overwrite)
        try:
            group = zarr.open_group(
                SyncedStore(path),
                mode="w-",
                zarr_format=3,
                attributes={
                    "heddle_format": FORMAT,
                    "heddle_format_version": FORMAT_VERSION,
                    "metadata": facts,
                },
            )
            for name, table in TABLES.items():
                group.create_group(name)
                for column in table.columns:
                    _make_column(group, name, column)
            _to_disk(group)
            _set_attributes(group, {"committed": dict.fromkeys(TABLES, 0), COLUMNS_ADDED: sorted(LATER_COLUMNS)})
            _to_disk(group)
            return cls(group, lock)
        except OSError as error:
            lock.release()
            raise BadInput(f"cannot write a run to {path}: {error.strerror or error}") from None
        except BaseException:
            lock.release()
            raise

    @classmethod
    def append_to(cls, path: str | Path) -> RunStore:
        """Open an existing run for appending after its last committed trajectory.

        Raises
        ------
        BadInput
            If it is no run of this package, has another format version, is damaged, is being written by another
            process, or cannot be written.
        """
        path = Path(path)
        open_run(path, "r")
        lock = _lock_directory(path)
        try:
            for leftover in sorted(path.rglob("*.partial")):  # of a zarr write that was killed
                leftover.unlink()
            return cls(open_run(path, "r+"), lock)
        except OSError as error:
            lock.release()
            raise BadInput(f"cannot write the run {path}: {error.strerror or error}") from None
        except BaseException:
            lock.release()
            raise

    def append(self, records: Sequence[TrajectoryRecord]) -> None:
        """Append trajectories and commit them, all or none.

        Raises
        ------
        ValueError
            If a trajectory id is already in the run, which is a bug of the caller. Nothing is written.
        OSError
            If writing fails. All or none are stored: check with `in`, and try again.
        """
        if not records:
            return
        with self._writing:
            self._settle()
            new_ids = [encodable_text(record.trajectory_id) for record in records]
            if len(set(new_ids)) < len(new_ids) or not self._ids.isdisjoint(new_ids):
                doubled = sorted(i for i in set(new_ids) if new_ids.count(i) > 1 or i in self._ids)
                raise ValueError(f"trajectory {doubled[0]!r} is stored already")
            tables = to_rows(records, self._rows)
            try:
                self._rows = self._commit(tables)
            except BaseException:
                self._in_doubt = True
                raise
            self._ids.update(new_ids)

    def update_metadata(self, changes: Mapping[str, Any]) -> None:
        """Set entries of the metadata, such as how the run ended."""
        facts = json.loads(json.dumps(dict(changes)))
        with self._writing:
            self._settle()
            metadata: Any = self._group.attrs["metadata"]
            try:
                self._set_attributes({"metadata": {**metadata, **facts}})
            except BaseException:
                self._in_doubt = True
                raise

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def __contains__(self, trajectory_id: str) -> bool:
        self._settle()
        return encodable_text(trajectory_id) in self._ids

    def __len__(self) -> int:
        self._settle()
        return self._rows["trajectories"]

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _settle(self) -> None:
        """Read the committed state from disk after a failed append, which may or may not have been committed."""
        if self._in_doubt:
            with self._writing:  # idempotent
                if isinstance(self._group.store, SyncedStore):
                    self._group.store.discard()
                self._adopt(zarr.open_group(self._group.store_path, mode="r+", zarr_format=3))

    def _adopt(self, group: zarr.Group) -> None:
        """Take over the committed rows and truncate the others."""
        self._group = group
        self._rows = committed_rows(group)
        _add_later_columns(group, self._rows)
        self._columns = {
            table: {
                # Missing chunks are noticed because none is left out.
                column: open_column(group, table, column, self._rows[table]).with_config({"write_empty_chunks": True})
                for column in layout.columns
            }
            for table, layout in TABLES.items()
        }
        for table, columns in self._columns.items():
            for array in columns.values():
                rows = self._rows[table]
                # An append completes the last chunk: what it holds must be right.
                read_rows(array, rows // TABLES[table].chunk_rows * TABLES[table].chunk_rows, rows)
                _resize(array, rows)
        _to_disk(group)
        ids = read_rows(self._columns["trajectories"]["id"], 0, self._rows["trajectories"])
        self._ids = set(ids.tolist())
        self._in_doubt = False

    def _commit(self, tables: Mapping[str, Rows]) -> dict[str, int]:
        if self._lock is not None:
            self._lock.check()
        rows = dict(self._rows)
        for table, columns in tables.items():
            rows[table] += self._write(table, columns)
        _to_disk(self._group)
        self._set_attributes({"committed": rows})
        return rows

    def _write(self, table: str, columns: Rows) -> int:
        start = self._rows[table]
        count = len(next(iter(columns.values())))
        for name, values in columns.items():
            array = self._columns[table][name]
            _resize(array, start + count)
            if count:
                array[start : start + count] = values
        return count

    def _set_attributes(self, changes: Mapping[str, Any]) -> None:
        """Change attributes of the root, in one write, and wait until they are on disk."""
        _set_attributes(self._group, changes)
        _to_disk(self._group)


def _set_attributes(group: zarr.Group, changes: Mapping[str, Any]) -> None:
    attributes = {**group.attrs.asdict(), **changes}
    group.update_attributes({**attributes, ATTRIBUTES_CRC: attributes_crc(attributes)})


def _to_disk(group: zarr.Group) -> None:
    """Wait until what was written is on disk; other stores than directories are as safe as they are."""
    if isinstance(group.store, SyncedStore):
        group.store.settle()


def recover(journal: str | Path, store: RunStore) -> int:
    """Append the finished trajectories that are in the journal but not in the store.

    For a crash between the writes to journal and store. Idempotent.

    Returns
    -------
    int
        Number of appended trajectories.

    Raises
    ------
    BadInput
        If the journal is missing or damaged before its end.
    """
    missing: dict[str, TrajectoryRecord] = {}
    count = 0
    for record in JournalReader(journal, {TRAJECTORY_FINISHED}):
        name = str(record.body.get("trajectory_id"))
        if name not in store:
            missing.setdefault(name, trajectory_from_body(record.body))
        if len(missing) == _RECOVERED_AT_ONCE:
            store.append(list(missing.values()))
            count += len(missing)
            missing = {}
    store.append(list(missing.values()))
    return count + len(missing)


def _make_directory(path: Path, overwrite: bool) -> WriterLock:
    """Make an empty directory at `path`, or empty the run that is there; it is locked."""
    if path.exists() or path.is_symlink():
        if not overwrite:
            raise BadInput(f"{path} exists: choose another path, append to it or overwrite it")
        if not is_ours(path) and not (path.is_dir() and not any(path.iterdir())):
            raise BadInput(f"{path} is no run of heddle: it is not overwritten")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _lock_directory(path)
        os.fchmod(lock.descriptor, 0o700)  # other users reach no file below it, whatever its own mode
        # The root goes last, so that an interrupted removal still leaves a recognisable run.
        for entry in sorted(path.iterdir(), key=lambda entry: entry.name == "zarr.json"):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise BadInput(f"cannot write a run to {path}: {error.strerror}") from None
    return lock


def _lock_directory(path: Path) -> WriterLock:
    # Lock the directory itself: zarr warns about every unknown file in a group.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BadInput(f"cannot write the run {path}: {error.strerror}") from None
    return lock_or_refuse(descriptor, path)


def _make_column(group: zarr.Group, table: str, column: str, rows: int = 0, fill: Any = None) -> None:
    layout = TABLES[table]
    array = group.create_array(
        f"{table}/{column}",
        shape=(rows,),
        dtype=layout.columns[column],
        chunks=(layout.chunk_rows,),
        compressors=(ZstdCodec(), Crc32cCodec()),
        fill_value=fill,
        dimension_names=(layout.dimension,),
        config={"write_empty_chunks": True},
    )
    if rows:
        array[:] = array.fill_value


def _add_later_columns(group: zarr.Group, rows: Mapping[str, int]) -> None:
    """Add the columns that a run of an earlier version lacks, with `absent_value` in its existing rows."""
    missing = missing_columns(group)
    for name in sorted(missing):
        table, _, column = name.partition("/")
        _make_column(group, table, column, rows[table], absent_value(TABLES[table].columns[column]))
    if missing:
        _to_disk(group)
        _set_attributes(group, {COLUMNS_ADDED: sorted(LATER_COLUMNS)})


def _resize(array: zarr.Array[Any], rows: int) -> None:
    if array.shape[0] != rows:
        array.resize((rows,))
