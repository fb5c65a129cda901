"""Trajectories as rows of the tables of a run: how `RunStore` stores what `RunReader` reads back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from heddle_dask.core.errors import encodable_text
from heddle_dask.records.schema import STRING, TABLES
from heddle_dask.records.trajectory import TrajectoryRecord

# The columns of one table, by name.
Rows = dict[str, npt.NDArray[Any]]


def to_rows(records: Sequence[TrajectoryRecord], first: Mapping[str, int]) -> dict[str, Rows]:
    """Columns of all tables for `records`.

    Parameters
    ----------
    first
        Rows that each table already has: the offsets and the parents of the new rows count from there.
    """
    branches = [branch for record in records for branch in record.branches]
    lengths = [len(branch) for branch in branches]
    parents = {
        part: np.repeat(
            np.arange(len(records)) + first["trajectories"],
            [len(getattr(record, part)) for record in records],
        )
        for part in ("branches", "steps", "actions")
    }
    tables: dict[str, Rows] = {
        "tokens": {
            "ids": _joined([branch.token_ids for branch in branches], np.int32),
            "attribution": _joined([branch.attribution for branch in branches], np.uint8),
            "logprobs": _joined([branch.logprobs for branch in branches], np.float32),
            "policy_version": _joined([branch.policy_version for branch in branches], np.int32),
        },
        "branches": {
            "trajectory": parents["branches"],
            "token_offset": _offsets(lengths, first["tokens"]),
        },
    }
    for part in ("steps", "actions"):
        rows = [row for record in records for row in getattr(record, part)]
        tables[part] = {"trajectory": parents[part]} | {
            name: _column((getattr(row, name) for row in rows), dtype)
            for name, dtype in TABLES[part].columns.items()
            if name != "trajectory"
        }
    tables["trajectories"] = _trajectory_rows(records, first)
    return tables


def _trajectory_rows(records: Sequence[TrajectoryRecord], first: Mapping[str, int]) -> Rows:
    columns: Rows = {
        "id": _column((record.trajectory_id for record in records), STRING),
        "reward": _column((math.nan if record.reward is None else record.reward for record in records), "float64"),
    }
    for part, column in (("steps", "step"), ("branches", "branch"), ("actions", "action")):
        counts = [len(getattr(record, part)) for record in records]
        columns[f"{column}_offset"] = _offsets(counts, first[part])
    for name in ("reward_parts", "metadata"):
        columns[name] = _column((_json(getattr(record, name)) for record in records), STRING)
    for name, dtype in TABLES["trajectories"].columns.items():
        if name not in columns:
            columns[name] = _column((getattr(record, name) for record in records), dtype)
    return columns


def _column(values: Iterable[Any], dtype: str) -> npt.NDArray[Any]:
    if dtype == STRING:
        return np.array([encodable_text(value) for value in values], np.dtypes.StringDType())
    return np.array(list(values), dtype)


def _json(mapping: Mapping[str, Any]) -> str:
    return json.dumps(mapping) if mapping else ""


def _offsets(counts: Sequence[int], first: int) -> npt.NDArray[np.int64]:
    return first + np.concatenate(([0], np.cumsum(counts[:-1], dtype=np.int64)))[: len(counts)]


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays])
