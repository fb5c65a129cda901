"""The layout of a run in Zarr (see `docs/data.md`), and functions to recognise and open one.

A run is a Zarr v3 group with one subgroup per table and one array per column. Rows are only appended. The root
group's attribute `committed` has the number of valid rows; it is written last, so rows beyond it belong to an
incomplete append and are ignored.

What is read is checked. Chunks end with a CRC-32C (the last codec of every column), and every chunk of the committed
rows is a file, also one that holds zeros only; the root's attributes have the CRC-32 `attributes_crc32`. Runs of
earlier versions have neither checksums nor chunks of zeros; they are read as they are.

Text is Zarr's variable-length `string` type. Among the text types of zarr only this one has a v3 name (fixed-width
unicode and bytes warn that other readers may fail). It does not truncate, and zarr, dask.array and xarray all read it
as numpy's StringDType without a warning.
"""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.errors import BaseZarrError
from zarr.storage import LocalStore

from heddle_dask.core.errors import BadInput, MissingRun, one_line_of
from heddle_dask.core.plain_files import damaged, open_plain, read_plain
from heddle_dask.core.value_types import FAULTS, MOST_S
from heddle_dask.records.chunks import check_chunks, has_our_codecs
from heddle_dask.records.synced_store import SyncedStore

FORMAT = "heddle-run"
FORMAT_VERSION = 1

STRING = "string"


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of equal length along one dimension.

    Attributes
    ----------
    chunk_rows
        Rows per chunk. An append rewrites the last chunk of every column, so small chunks are fast to write and large
        chunks are fast to read; chunks are below 1 MB.
    """

    dimension: str
    chunk_rows: int
    columns: Mapping[str, str]


TABLES: Mapping[str, Table] = {
    "tokens": Table(
        "token",
        131_072,
        {
            "ids": "int32",
            "attribution": "uint8",
            "logprobs": "float32",
            "policy_version": "int32",
        },
    ),
    "branches": Table("branch", 4_096, {"trajectory": "int64", "token_offset": "int64"}),
    "steps": Table(
        "step",
        8_192,
        {
            "trajectory": "int64",
            "step_index": "int32",
            "branch": "int32",
            "token_start": "int32",
            "token_stop": "int32",
            "engine_id": STRING,
            "finish_reason": STRING,
            "prompt_tokens": "int32",
            "generated_tokens": "int32",
            "cached_tokens": "int32",
            "preemptions": "int32",
            "migrations": "int32",
            "submitted_s": "float64",
            "finished_s": "float64",
            "queue_s": "float64",
            "prefill_s": "float64",
            "decode_s": "float64",
            "max_tokens": "int32",
            "temperature": "float64",
            "top_p": "float64",
            "top_k": "int32",
            "min_p": "float64",
        },
    ),
    "actions": Table(
        "action",
        8_192,
        {
            "trajectory": "int64",
            "action_index": "int32",
            "after_step": "int32",
            "kind": STRING,
            "label": STRING,
            "cpus": "int32",
            "status": STRING,
            "submitted_s": "float64",
            "finished_s": "float64",
            "queue_s": "float64",
            "run_s": "float64",
            "branch": "int32",
            "quota_s": "float64",
            "load_s": "float64",
        },
    ),
    "trajectories": Table(
        "trajectory",
        1_024,
        {
            "id": STRING,
            "group_id": STRING,
            "task_id": STRING,
            "environment": STRING,
            "sample_index": "int32",
            "seed": "int64",
            "status": STRING,
            "cause": STRING,
            "detail": STRING,
            "reward": "float64",
            "step_offset": "int64",
            "branch_offset": "int64",
            "action_offset": "int64",
            "started_s": "float64",
            "finished_s": "float64",
            "domain": STRING,
            "message_tokens": "int64",
            "max_steps": "int64",
            "prompt_key": STRING,
            "reward_parts": STRING,
            "metadata": STRING,
            "reward_cause": STRING,
            "reward_detail": STRING,
        },
    ),
}

# Columns that runs of earlier versions lack.
LATER_COLUMNS = frozenset(
    {
        *(f"steps/{name}" for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p")),
        *(f"actions/{name}" for name in ("branch", "quota_s", "load_s")),
        *(f"trajectories/{name}" for name in ("domain", "message_tokens", "max_steps", "prompt_key")),
        *(f"trajectories/{name}" for name in ("reward_parts", "metadata", "reward_cause", "reward_detail")),
    }
)


def absent_value(dtype: str) -> str | int | float:
    """What a column of this type reads as in rows of a version that did not have it: empty, 0, or nan."""
    return "" if dtype == STRING else math.nan if dtype.startswith("float") else 0


# Attributes of the root: which of those a run has, and the checksum of the attributes.
COLUMNS_ADDED = "columns_added"
ATTRIBUTES_CRC = "attributes_crc32"

_MOST_ROWS, _MOST_COUNT = 2**40, 10_000_000

# What zarr, its codecs and its JSON raise for metadata and chunks that are not what was written.
_UNREADABLE = (*FAULTS, BaseZarrError, OSError)


def is_ours(path: Path) -> bool:
    """True if `path` is a run of this package, of any version, complete or not."""
    try:
        attributes = json.loads(read_plain(path / "zarr.json"))["attributes"]
        return bool(attributes["heddle_format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def open_run(path: Path, mode: Any) -> zarr.Group:
    """Open the root group of a run.

    Raises
    ------
    BadInput
        If there is no run of this package, a run of another format version, or a run whose creation was interrupted.
    """
    if not path.exists():
        raise MissingRun(f"no run at {path}: give the path of a run (RUN.zarr)")
    if not is_ours(path):
        raise BadInput(f"{path} is no run of heddle: give the path of a run (RUN.zarr)")
    try:
        for name in _metadata_files():
            with contextlib.suppress(FileNotFoundError):
                open_plain(path / name).close()  # zarr would wait for a FIFO
        group = zarr.open_group(SyncedStore(path), mode=mode, zarr_format=3)
        attributes = group.attrs.asdict()
        crc = attributes_crc(attributes)
    except BadInput:
        raise
    except _UNREADABLE as error:
        raise BadInput(f"cannot open the run {path}: {one_line_of(error)}") from None
    version = attributes.get("heddle_format_version")
    if version != FORMAT_VERSION:
        raise BadInput(
            f"{path} has run format {version}, this version of heddle reads {FORMAT_VERSION}: "
            "use the version that wrote it"
        )
    if "committed" not in attributes:
        raise BadInput(
            f"{path} was never completely made (its creation was interrupted): create it again with overwrite"
        )
    if attributes.get(ATTRIBUTES_CRC, crc) != crc:
        raise damaged(path / "zarr.json", "its checksum is wrong")
    if not _are_of_a_run(attributes):
        raise damaged(path / "zarr.json", "its attributes are not those of a run")
    return group


def _metadata_files() -> Iterator[str]:
    for table, layout in TABLES.items():
        yield f"{table}/zarr.json"
        yield from (f"{table}/{column}/zarr.json" for column in layout.columns)


def _are_of_a_run(attributes: Mapping[str, Any]) -> bool:
    committed, metadata = attributes["committed"], attributes.get("metadata")
    return (
        isinstance(committed, dict)
        and all(_is_count(committed.get(table), _MOST_ROWS) for table in TABLES)
        and isinstance(metadata, dict)
        and isinstance(metadata.get("batch_facts", []), list)
        and isinstance(attributes.get(COLUMNS_ADDED, []), list)
    )


def counted(metadata: Mapping[str, Any], name: str, default: int) -> int:
    """An entry of a run's metadata with which readers count; `BadInput` if it is no number, or one of no run."""
    value = metadata.get(name, default)
    if not _is_count(value, _MOST_COUNT):
        raise BadInput(f"the metadata of the run has the {name} {str(value)[:60]!r}: restore it from a copy")
    return int(value)


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and 0 <= value <= most


def attributes_crc(attributes: Mapping[str, Any]) -> int:
    """CRC-32 of the attributes of a run's root, its own entry left out."""
    covered = {name: value for name, value in attributes.items() if name != ATTRIBUTES_CRC}
    return zlib.crc32(json.dumps(covered, sort_keys=True).encode())


def committed_rows(group: zarr.Group) -> dict[str, int]:
    committed: Any = group.attrs["committed"]
    return {table: int(committed[table]) for table in TABLES}


def missing_columns(group: zarr.Group) -> frozenset[str]:
    """Which of `LATER_COLUMNS` the run lacks because an earlier version made it."""
    has: Any = group.attrs.get(COLUMNS_ADDED, ())
    return frozenset(name for name in LATER_COLUMNS if name not in has and name not in group)


def open_column(group: zarr.Group, table: str, column: str, rows: int) -> zarr.Array[Any]:
    """One column of a run; it has at least `rows` rows.

    Raises
    ------
    BadInput
        If the column is missing, unreadable, shorter, or not what a run has there: the run was damaged.
    """
    name = f"{table}/{column}"
    where = _path_of(group, name)
    try:
        array = group[name]
        assert isinstance(array, zarr.Array), "it is no array"
        facts = (array.ndim, array.chunks, array.dtype)
        assert has_our_codecs(array), "it is encoded in another way"
    except BadInput:
        raise
    except _UNREADABLE as error:
        raise damaged(where, one_line_of(error)) from None
    layout = TABLES[table]
    kind = layout.columns[column]
    dtype = np.dtypes.StringDType() if kind == STRING else np.dtype(kind)
    if facts != (1, (layout.chunk_rows,), dtype):
        raise damaged(where, "its type is not that of this column")
    if array.shape[0] < rows:
        raise damaged(where, f"it is shorter than {rows} rows")
    return array


def read_rows(array: zarr.Array[Any], start: int, stop: int) -> npt.NDArray[Any]:
    """Committed rows of a column.

    Raises
    ------
    BadInput
        If a chunk is missing, unreadable or has a wrong checksum, or times of no run: the run was damaged.
    """
    if stop <= start:
        return np.empty(0, array.dtype)
    try:
        check_chunks(array, start, stop)
        values = np.asarray(array[start:stop])
        if array.path.endswith("_s") and bool((np.abs(values) > MOST_S).any()):
            raise ValueError(f"it has times beyond {MOST_S:g} s")
        return values
    except BadInput:
        raise
    except _UNREADABLE as error:
        raise damaged(_path_of(array, ""), one_line_of(error)) from None


def _path_of(node: zarr.Group | zarr.Array[Any], name: str) -> Path:
    root = node.store.root if isinstance(node.store, LocalStore) else Path(str(node.store))
    return root / node.path / name
