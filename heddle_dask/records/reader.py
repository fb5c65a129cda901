"""Reading a run: committed rows only, so it also works during a write and after a crash."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt
import zarr

from heddle_dask.core.errors import BadInput
from heddle_dask.core.notebook import facts_html, named_repr, rows_html
from heddle_dask.core.plain_files import damaged
from heddle_dask.core.value_types import read_from
from heddle_dask.records.schema import (
    STRING,
    TABLES,
    absent_value,
    committed_rows,
    counted,
    missing_columns,
    open_column,
    open_run,
    read_rows,
)
from heddle_dask.records.token_record import Attribution, TokenRecord
from heddle_dask.records.trajectory import ActionRecord, StepRecord, TrajectoryOutline, TrajectoryRecord, check_ending

# Small beside the others; offsets are needed at random.
_CACHED = ("trajectories", "branches")
_JSON_COLUMNS = ("reward_parts", "metadata")
_OUTLINED = [field.name for field in fields(TrajectoryOutline) if field.name not in ("steps", "actions")]

_Row = TypeVar("_Row")


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

    `len(reader)` is the number of trajectories; iteration is in the order of the store. Columns of trajectories and
    branches are cached in memory; tokens, steps and actions are read chunk by chunk.

    Every method raises `BadInput` where the run is damaged.
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
        self._windows: dict[str, _TableWindow] = {}

    @property
    def rows(self) -> Mapping[str, int]:
        """Committed rows by table: tokens, branches, steps, actions, trajectories."""
        return dict(self._rows)

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the run: environment, model, strategy, seed, versions and more."""
        metadata: Any = self._group.attrs["metadata"]
        return dict(metadata)

    @property
    def batches(self) -> list[dict[str, Any]]:
        """What each batch was made with, oldest first: model, sampling, limits, sandbox, seed and more.

        An empty mapping for a batch of a version that did not record it.
        """
        metadata = self.metadata
        facts: Any = metadata.get("batch_facts", [])
        return [*facts, *({} for _ in range(counted(metadata, "batches", 0) - len(facts)))]

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
        values = _Column(self._group, table, column, rows).read(0, rows)
        values.flags.writeable = False
        if table in _CACHED:
            self._cache[name] = values
        return values

    def trajectory(self, index: int) -> TrajectoryRecord:
        """The trajectory in row `index`, equal to the appended record.

        Raises
        ------
        IndexError
            If there is no such row.
        """
        self._check_index(index)
        with read_from(self.path):
            return TrajectoryRecord(
                **self._facts(index),
                branches=self._branches(index),
                steps=self._part("steps", index, StepRecord),
                actions=self._part("actions", index, ActionRecord),
            )

    def outline(self, index: int) -> TrajectoryOutline:
        """The trajectory in row `index` without its tokens, which are not read.

        Raises
        ------
        IndexError
            If there is no such row.
        """
        self._check_index(index)
        with read_from(self.path):
            facts = self._facts(index)
            check_ending(facts["status"], facts["cause"])
            return TrajectoryOutline(
                **{name: facts[name] for name in _OUTLINED},
                steps=self._part("steps", index, StepRecord),
                actions=self._part("actions", index, ActionRecord),
            )

    def summary(self) -> RunSummary:
        """Totals over all committed trajectories."""
        reward = self.column("trajectories/reward")
        known = reward[np.isfinite(reward)]
        started, finished = (self.column(f"trajectories/{n}_s") for n in ("started", "finished"))
        return RunSummary(
            trajectories=len(self),
            by_status=_counts(self.column("trajectories/status")),
            by_cause=_counts(self.column("trajectories/cause")),
            steps=self._rows["steps"],
            actions=self._rows["actions"],
            stored_tokens=self._rows["tokens"],
            sampled_tokens=self._sampled_tokens(),
            generated_tokens=int(self.column("steps/generated_tokens").sum(dtype=np.int64)),
            preemptions=int(self.column("steps/preemptions").sum(dtype=np.int64)),
            migrations=int(self.column("steps/migrations").sum(dtype=np.int64)),
            rewards_known=len(known),
            reward_mean=float(known.mean()) if len(known) else None,
            makespan_s=float(np.nanmax(finished) - np.nanmin(started)) if len(self) else 0.0,
        )

    def __repr__(self) -> str:
        metadata = self.metadata
        made_with = {name: metadata.get(name) for name in ("environment", "model", "strategy")}
        return named_repr(f"Run {self.path}", {"trajectories": len(self), **made_with})

    def _repr_html_(self) -> str:
        """What a notebook shows; reads no tokens."""
        metadata = self.metadata
        made_with = ", ".join(str(metadata[name]) for name in ("environment", "model", "strategy") if name in metadata)
        reward = self.column("trajectories/reward")
        known = reward[np.isfinite(reward)]
        facts: dict[str, object] = {
            "made with": made_with,
            "mean reward": float(known.mean()) if len(known) else "unknown",
            "steps, actions": f"{self._rows['steps']:,}, {self._rows['actions']:,}",
            "tokens stored": self._rows["tokens"],
        }
        ends = _counts(self.column("trajectories/status"))
        return facts_html(
            f"Run {self.path.name}: {len(self):,} trajectories",
            facts,
            rows_html(("status", "number"), ends.items()),
        )

    def _sampled_tokens(self) -> int:
        """Counted chunk by chunk: the column of a long run does not fit in memory."""
        rows, chunk_rows = self._rows["tokens"], TABLES["tokens"].chunk_rows
        authors = _Column(self._group, "tokens", "attribution", rows)
        chunks = (authors.read(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows))
        return sum(int((chunk == Attribution.POLICY).sum()) for chunk in chunks)

    def __len__(self) -> int:
        return self._rows["trajectories"]

    @overload
    def __getitem__(self, index: int) -> TrajectoryRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[TrajectoryRecord]: ...

    def __getitem__(self, index: int | slice) -> TrajectoryRecord | list[TrajectoryRecord]:
        """One trajectory, counted from the end if negative, or a list of them."""
        if isinstance(index, slice):
            return [self.trajectory(each) for each in range(len(self))[index]]
        return self.trajectory(index + len(self) if index < 0 else index)

    def __iter__(self) -> Iterator[TrajectoryRecord]:
        for index in range(len(self)):
            yield self.trajectory(index)

    def _check_index(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise IndexError(f"no trajectory {index}: the run has {len(self)}")

    def _facts(self, index: int) -> dict[str, Any]:
        """What is stored of a trajectory itself, by the names of `TrajectoryRecord`."""
        facts: dict[str, Any] = {}
        for column, kind in TABLES["trajectories"].columns.items():
            if not column.endswith("_offset"):
                value = self.column(f"trajectories/{column}")[index]
                facts[column] = str(value) if kind == STRING else value.item()
        for column in _JSON_COLUMNS:
            facts[column] = dict(json.loads(facts[column] or "{}"))
        facts["trajectory_id"] = facts.pop("id")
        if not math.isfinite(facts["reward"]):
            facts["reward"] = None
        return facts

    def _span(self, offsets: str, index: int, total: int) -> tuple[int, int]:
        """Rows of item `index`: from its offset to the next one's, or to the end of the table."""
        column = self.column(offsets)
        start, stop = int(column[index]), int(column[index + 1]) if index + 1 < len(column) else total
        if not 0 <= start <= stop <= total:
            raise damaged(self.path / offsets, f"rows {start} to {stop} of {total}")
        return start, stop

    def _window(self, table: str) -> _TableWindow:
        window = self._windows.get(table)
        if window is None:
            window = self._windows[table] = _TableWindow(self._group, table, self._rows[table])
        return window

    def _branches(self, index: int) -> tuple[TokenRecord, ...]:
        first, last = self._span("trajectories/branch_offset", index, self._rows["branches"])
        spans = [self._span("branches/token_offset", branch, self._rows["tokens"]) for branch in range(first, last)]
        columns = (self._window("tokens").rows(start, stop) for start, stop in spans)
        return tuple(
            TokenRecord.from_arrays(each["ids"], each["attribution"], each["logprobs"], each["policy_version"])
            for each in columns
        )

    def _part(self, table: str, index: int, kind: type[_Row]) -> tuple[_Row, ...]:
        """Rows of `table` that belong to trajectory `index`."""
        start, stop = self._span(f"trajectories/{table[:-1]}_offset", index, self._rows[table])
        columns = self._window(table).rows(start, stop)
        names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
        rows = zip(*(columns[name].tolist() for name in names), strict=True)
        return tuple(kind(**dict(zip(names, row, strict=True))) for row in rows)


class _Column:
    """One column of a table; one that the run lacks, as those of earlier versions do, has `absent_value`."""

    def __init__(self, group: zarr.Group, table: str, column: str, rows: int) -> None:
        kind = TABLES[table].columns[column]
        self._dtype = np.dtypes.StringDType() if kind == STRING else np.dtype(kind)
        self._absent = absent_value(kind)
        lacks = f"{table}/{column}" in missing_columns(group)
        self._array = None if lacks else open_column(group, table, column, rows)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        if self._array is None:
            return np.full(stop - start, self._absent, self._dtype)
        return read_rows(self._array, start, stop)


class _TableWindow:
    """A range of whole chunks of a table's columns in memory; reading in order decodes each chunk once."""

    def __init__(self, group: zarr.Group, table: str, rows: int) -> None:
        self._rows = rows
        self._chunk_rows = TABLES[table].chunk_rows
        self._columns = {name: _Column(group, table, name, rows) for name in TABLES[table].columns}
        self._start = self._stop = 0
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def rows(self, start: int, stop: int) -> dict[str, npt.NDArray[Any]]:
        if not self._arrays or not self._start <= start <= stop <= self._stop:
            self._load(start, stop)
        part = slice(start - self._start, stop - self._start)
        return {name: array[part] for name, array in self._arrays.items()}

    def _load(self, start: int, stop: int) -> None:
        chunk = self._chunk_rows
        self._start = start // chunk * chunk
        self._stop = min(-(-stop // chunk) * chunk, self._rows)
        self._arrays = {name: column.read(self._start, self._stop) for name, column in self._columns.items()}


def column_names() -> list[str]:
    """Every column that `RunReader.column` accepts."""
    return [f"{name}/{column}" for name, table in TABLES.items() for column in table.columns]


def _counts(values: npt.NDArray[Any]) -> dict[str, int]:
    return dict(sorted(Counter(values.tolist()).items()))
