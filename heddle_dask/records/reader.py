"""Reading a run: committed rows only, so it also works during a write and after a crash."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from heddle_dask.core.errors import BadInput
from heddle_dask.records.schema import (
    LATER_COLUMNS,
    STRING,
    TABLES,
    absent_value,
    committed_rows,
    open_column,
    open_run,
)
from heddle_dask.records.token_record import Attribution, TokenRecord
from heddle_dask.records.trajectory import ActionRecord, StepRecord, TrajectoryRecord


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Totals of a run.

    Attributes
    ----------
    stored_tokens
        Sum over all branches: what branches share counts once per branch.
    sampled_tokens
        Those in the loss mask: each counts once.
    generated_tokens
        Sum over all steps.
    rewards_known, reward_mean
        Unknown rewards are left out, not counted as 0; the mean is None if no reward is known.
    makespan_s
        From the first start to the last end, 0.0 for an empty run.
    """

    trajectories: int
    by_status: Mapping[str, int]
    by_cause: Mapping[str, int]
    steps: int
    actions: int
    stored_tokens: int
    sampled_tokens: int
    generated_tokens: int
    preemptions: int
    migrations: int
    rewards_known: int
    reward_mean: float | None
    makespan_s: float


class RunReader:
    """The committed part of a run at the time of construction; make a new reader to see later commits.

    `len(reader)` is the number of trajectories; iteration is in the order of the store. Table columns are cached in
    memory; token columns are read chunk by chunk.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the run at `path`.

        Raises
        ------
        BadInput
            If it is no run of this package, or has another format version.
        """
        self.path = Path(path)
        self._group = open_run(self.path, "r")
        self._rows = committed_rows(self._group)
        self._cache: dict[str, npt.NDArray[Any]] = {}
        self._tokens = _TokenWindow(self._group, self._rows["tokens"])

    @property
    def rows(self) -> Mapping[str, int]:
        """Committed rows by table: tokens, branches, steps, actions, trajectories."""
        return dict(self._rows)

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the run: environment, model, strategy, seed, versions, …"""
        metadata: Any = self._group.attrs["metadata"]
        return dict(metadata)

    @property
    def batches(self) -> list[dict[str, Any]]:
        """What each batch was made with, oldest first: model, sampling, limits, sandbox, seed and more.

        An empty mapping for a batch of a version that did not record it.
        """
        metadata = self.metadata
        facts: Any = metadata.get("batch_facts", [])
        return [*facts, *({} for _ in range(int(metadata.get("batches", 0)) - len(facts)))]

    def column(self, name: str) -> npt.NDArray[Any]:
        """One column by its path, as ``"steps/decode_s"``; read-only.

        Raises
        ------
        BadInput
            If there is no such column, or it is damaged.
        """
        table, _, column = name.partition("/")
        if table not in TABLES or column not in TABLES[table].columns:
            raise BadInput(f"no column {name!r} in a run; there are: {', '.join(column_names())}")
        if name in self._cache:
            return self._cache[name]
        rows = self._rows[table]
        if name in LATER_COLUMNS and name not in self._group:
            dtype = TABLES[table].columns[column]
            values = np.full(rows, absent_value(dtype), np.dtypes.StringDType() if dtype == STRING else dtype)
        else:
            values = np.asarray(open_column(self._group, table, column, rows)[:rows])
        values.flags.writeable = False
        if table != "tokens":
            self._cache[name] = values
        return values

    def trajectory(self, index: int) -> TrajectoryRecord:
        """The trajectory in row `index`, equal to the appended record.

        Raises
        ------
        IndexError
            If there is no such row.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"no trajectory {index}: the run has {len(self)}")

        def value(column: str) -> Any:
            return self.column(f"trajectories/{column}")[index].item()

        reward = float(value("reward"))
        return TrajectoryRecord(
            trajectory_id=self._text("id", index),
            group_id=self._text("group_id", index),
            task_id=self._text("task_id", index),
            environment=self._text("environment", index),
            sample_index=value("sample_index"),
            seed=value("seed"),
            status=self._text("status", index),  # type: ignore[arg-type]  # checked by the record
            cause=self._text("cause", index),  # type: ignore[arg-type]
            detail=self._text("detail", index),
            reward=None if math.isnan(reward) else reward,
            branches=self._branches(index),
            steps=tuple(StepRecord(**row) for row in self._part("steps", index, StepRecord)),
            actions=tuple(ActionRecord(**row) for row in self._part("actions", index, ActionRecord)),
            started_s=value("started_s"),
            finished_s=value("finished_s"),
            domain=self._text("domain", index),
            message_tokens=value("message_tokens"),
            max_steps=value("max_steps"),
            reward_parts=self._json("reward_parts", index),
            metadata=self._json("metadata", index),
        )

    def summary(self) -> RunSummary:
        """Totals over all committed trajectories."""
        reward = self.column("trajectories/reward")
        known = reward[~np.isnan(reward)]
        started, finished = (self.column(f"trajectories/{n}_s") for n in ("started", "finished"))
        return RunSummary(
            trajectories=len(self),
            by_status=_counts(self.column("trajectories/status")),
            by_cause=_counts(self.column("trajectories/cause")),
            steps=self._rows["steps"],
            actions=self._rows["actions"],
            stored_tokens=self._rows["tokens"],
            sampled_tokens=int((self.column("tokens/attribution") == Attribution.POLICY).sum()),
            generated_tokens=int(self.column("steps/generated_tokens").sum(dtype=np.int64)),
            preemptions=int(self.column("steps/preemptions").sum(dtype=np.int64)),
            migrations=int(self.column("steps/migrations").sum(dtype=np.int64)),
            rewards_known=len(known),
            reward_mean=float(known.mean()) if len(known) else None,
            makespan_s=float(np.nanmax(finished) - np.nanmin(started)) if len(self) else 0.0,
        )

    def __len__(self) -> int:
        return self._rows["trajectories"]

    def __iter__(self) -> Iterator[TrajectoryRecord]:
        for index in range(len(self)):
            yield self.trajectory(index)

    def _text(self, column: str, index: int) -> str:
        return str(self.column(f"trajectories/{column}")[index])

    def _json(self, column: str, index: int) -> dict[str, Any]:
        return dict(json.loads(self._text(column, index) or "{}"))

    def _span(self, offsets: str, index: int, total: int) -> tuple[int, int]:
        """Rows of item `index`: from its offset to the next one's, or to the end of the table."""
        column = self.column(offsets)
        stop = int(column[index + 1]) if index + 1 < len(column) else total
        return int(column[index]), stop

    def _branches(self, index: int) -> tuple[TokenRecord, ...]:
        first, last = self._span("trajectories/branch_offset", index, self._rows["branches"])
        spans = [
            self._span("branches/token_offset", branch, self._rows["tokens"]) for branch in range(first, last)
        ]
        return tuple(self._tokens.record(start, stop) for start, stop in spans)

    def _part(self, table: str, index: int, kind: type[Any]) -> Iterator[dict[str, Any]]:
        """Rows of `table` that belong to trajectory `index`, as keyword arguments of `kind`."""
        offset = f"trajectories/{table[:-1]}_offset"
        start, stop = self._span(offset, index, self._rows[table])
        names = [field.name for field in fields(kind)]
        columns = [self.column(f"{table}/{name}")[start:stop].tolist() for name in names]
        for row in zip(*columns, strict=True):
            yield dict(zip(names, row, strict=True))


class _TokenWindow:
    """A range of whole chunks of the token columns in memory; reading in order decodes each chunk once."""

    def __init__(self, group: zarr.Group, rows: int) -> None:
        self._rows = rows
        self._columns = [open_column(group, "tokens", name, rows) for name in TABLES["tokens"].columns]
        self._start = self._stop = 0
        self._arrays: list[npt.NDArray[Any]] = [np.empty(0) for _ in self._columns]

    def record(self, start: int, stop: int) -> TokenRecord:
        if not self._start <= start <= stop <= self._stop:
            self._load(start, stop)
        part = slice(start - self._start, stop - self._start)
        return TokenRecord.from_arrays(*(array[part] for array in self._arrays))

    def _load(self, start: int, stop: int) -> None:
        chunk = TABLES["tokens"].chunk_rows
        self._start = start // chunk * chunk
        self._stop = min(-(-stop // chunk) * chunk, self._rows)
        self._arrays = [np.asarray(column[self._start : self._stop]) for column in self._columns]


def column_names() -> list[str]:
    """Every column that `RunReader.column` accepts."""
    return [f"{name}/{column}" for name, table in TABLES.items() for column in table.columns]


def _counts(values: npt.NDArray[Any]) -> dict[str, int]:
    return dict(sorted(Counter(values.tolist()).items()))
