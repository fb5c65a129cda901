"""Exports a run to other formats; the libraries for them are optional."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.records.reader import RunReader
from heddle_dask.records.trajectory import TrajectoryRecord

# Branches per row group: bounds the memory of the export, whatever the size of the run.
_ROW_GROUP_BRANCHES = 1_024

_TRAJECTORY_COLUMNS = {
    "trajectory_id": "string",
    "group_id": "string",
    "task_id": "string",
    "environment": "string",
    "sample_index": "int32",
    "seed": "int64",
    "status": "string",
    "cause": "string",
    "detail": "string",
    "reward": "float64",
    "started_s": "float64",
    "finished_s": "float64",
}
_JSON_COLUMNS = {"reward_parts": "string", "metadata": "string"}
_BRANCH_COLUMNS = {"branch": "int32", "branches": "int32"}
_TOKEN_COLUMNS = {
    "token_ids": "int32",
    "loss_mask": "bool_",
    "logprobs": "float32",
    "policy_version": "int32",
}


def export_parquet(run: RunReader, path: str | Path) -> int:
    """Write a run to one Parquet file, one row per branch.

    Columns: those of the trajectory (reward null if unknown; `reward_parts` and `metadata` as JSON text), `branch` and
    `branches` (the index of the branch, and the number of branches that share the reward), and lists over its tokens:
    `token_ids`, `loss_mask`, `logprobs` (nan if not sampled), `policy_version` (-1 if not sampled).

    Returns
    -------
    int
        Rows written.

    Raises
    ------
    BadInput
        If pyarrow is not installed, the path exists or cannot be written, or the run is damaged; then there is no file.
    """
    path = Path(path)
    try:
        # Imported by name, so that the package can be imported, typed and linted without pyarrow.
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise BadInput("the Parquet export needs pyarrow: pip install pyarrow") from None
    if path.exists():
        raise BadInput(f"{path} exists: choose another path")
    schema = _schema(arrow)
    count = 0
    try:
        with parquet.ParquetWriter(path, schema) as writer:
            for rows in _batches(run):
                writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
                count += len(rows)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from None
    except BadInput:
        path.unlink()
        raise
    return count


def _schema(arrow: Any) -> Any:
    flat = {**_TRAJECTORY_COLUMNS, **_JSON_COLUMNS, **_BRANCH_COLUMNS}
    fields = [(name, getattr(arrow, kind)()) for name, kind in flat.items()]
    lists = [(name, arrow.list_(getattr(arrow, kind)())) for name, kind in _TOKEN_COLUMNS.items()]
    return arrow.schema(fields + lists)


def _batches(run: RunReader) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    for record in run:
        rows.extend(_branch_rows(record))
        if len(rows) >= _ROW_GROUP_BRANCHES:
            yield rows
            rows = []
    if rows:
        yield rows


def _branch_rows(record: TrajectoryRecord) -> Iterator[dict[str, Any]]:
    shared = {name: getattr(record, name) for name in _TRAJECTORY_COLUMNS}
    shared |= {name: json.dumps(dict(getattr(record, name))) for name in _JSON_COLUMNS}
    for index, branch in enumerate(record.branches):
        tokens = {name: getattr(branch, name) for name in _TOKEN_COLUMNS}
        yield {**shared, "branch": index, "branches": len(record.branches), **tokens}
