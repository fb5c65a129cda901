"""The layout of a run in Zarr (see `docs/data.md`), and functions to recognise and open one.

A run is a Zarr v3 group with one subgroup per table and one array per column. Rows are only appended. The root
group's attribute `committed` has the number of valid rows; it is written last, so rows beyond it belong to an
incomplete append and are ignored.

Text is Zarr's variable-length `string` type. Among the text types of zarr only this one has a v3 name (fixed-width
unicode and bytes warn that other readers may fail). It does not truncate, and zarr, dask.array and xarray all read it
as numpy's StringDType without a warning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zarr
from zarr.errors import BaseZarrError

from heddle_dask.core.errors import BadInput

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
    columns
        Name to Zarr data type.
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
            "reward_parts": STRING,
            "metadata": STRING,
        },
    ),
}

# Columns that runs of earlier versions lack.
LATER_COLUMNS = frozenset(
    {
        *(f"steps/{name}" for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p")),
        "actions/branch",
        *(f"trajectories/{name}" for name in ("domain", "message_tokens", "max_steps")),
        *(f"trajectories/{name}" for name in ("reward_parts", "metadata")),
    }
)


def absent_value(dtype: str) -> str | int | float:
    """What a column of this type reads as in rows of a version that did not have it: empty, 0, or nan."""
    return "" if dtype == STRING else math.nan if dtype.startswith("float") else 0


# Errors that zarr raises for a directory that does not match its metadata.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, BaseZarrError)


def is_ours(path: Path) -> bool:
    """True if `path` is a run of this package, of any version, complete or not."""
    try:
        attributes = json.loads((path / "zarr.json").read_bytes())["attributes"]
        return bool(attributes["heddle_format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def open_run(path: Path, mode: Any) -> zarr.Group:
    """Open the root group of a run.

    Raises
    ------
    BadInput
        If there is no run of this package, a run of another format version, or a run whose creation was interrupted.
    """
    if not path.exists():
        raise BadInput(f"no run at {path}: give the path of a run (RUN.zarr)")
    if not is_ours(path):
        raise BadInput(f"{path} is no run of heddle: give the path of a run (RUN.zarr)")
    try:
        group = zarr.open_group(path, mode=mode, zarr_format=3)
        attributes = group.attrs.asdict()
    except _UNREADABLE as error:
        raise BadInput(f"cannot open the run {path}: {_one_line(error)}") from None
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
    return group


def committed_rows(group: zarr.Group) -> dict[str, int]:
    """Committed rows by table."""
    committed: Any = group.attrs["committed"]
    return {table: int(committed[table]) for table in TABLES}


def open_column(group: zarr.Group, table: str, column: str, rows: int) -> zarr.Array[Any]:
    """One column of a run; it has at least `rows` rows.

    Raises
    ------
    BadInput
        If the column is missing, unreadable or shorter: the run was damaged.
    """
    name = f"{table}/{column}"
    try:
        array = group[name]
    except _UNREADABLE as error:
        raise BadInput(f"the run is damaged: column {name}: {_one_line(error)}") from None
    if not isinstance(array, zarr.Array) or array.ndim != 1 or array.shape[0] < rows:
        raise BadInput(f"the run is damaged: column {name} is shorter than {rows} rows")
    return array


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
