"""A stored run, read from its store and its journal without changing either; and the path of a new one.

Trajectories that a killed driver had finished but not stored are in the journal; `heddle rollout --resume` or
``--append`` writes them to the store, reading never does.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput, MissingRun
from heddle_dask.core.plain_files import damaged
from heddle_dask.core.value_types import read_from
from heddle_dask.live.driver.files.run_writer import WriteMode, journal_path
from heddle_dask.records.causes import Ended
from heddle_dask.records.journal import JournalReader
from heddle_dask.records.journal_lines import RESULTS
from heddle_dask.records.reader import RunReader
from heddle_dask.records.schema import is_ours
from heddle_dask.records.store import RunStore
from heddle_dask.records.trajectory import (
    TRAJECTORY_FINISHED,
    TrajectoryOutline,
    TrajectoryRecord,
    trajectory_from_body,
)

RUNS = Path("runs")
"""Where a run goes that was given no path."""


class StoredRun:
    """All finished trajectories of a run: first those in the store, then those only in the journal.

    Attributes
    ----------
    reader
        Of those in the store.
    recovered
        Trajectories that only the journal has.
    unfinished
        Trajectories with journalled steps or actions and no end.
    dropped_bytes
        Length of the journal's torn tail.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        journal = journal_path(self.path)
        # Opened before the store is read: what a writer then brings into the store and drops from the journal is read.
        lines = JournalReader(journal, RESULTS) if journal.exists() else None
        self.reader = RunReader(self.path)
        ids = [str(name) for name in self.reader.column("trajectories/id").tolist()]
        self._rows = {name: row for row, name in enumerate(ids)}
        self._journalled: dict[str, dict[str, Any]] = {}
        open_ids: dict[str, None] = {}
        if len(self._rows) < len(ids):
            raise damaged(self.path / "trajectories/id", "it has an id twice")
        with read_from(journal):
            for kind, body, _ in lines or ():
                name = body["trajectory_id"]
                if name in self._rows:
                    continue
                if kind == TRAJECTORY_FINISHED:
                    self._journalled.setdefault(name, body)
                else:
                    open_ids[name] = None
        self.dropped_bytes = 0 if lines is None else lines.dropped_bytes
        self.stored = len(self._rows)
        self.recovered = len(self._journalled)
        self.unfinished = sum(not self._is_finished(name) for name in open_ids)

    @property
    def metadata(self) -> dict[str, Any]:
        return self.reader.metadata

    @property
    def ids(self) -> list[str]:
        return [*self._rows, *self._journalled]

    def find(self, name: str) -> TrajectoryRecord:
        """A trajectory by its id, or by its number in the order of `ids`."""
        ids = self.ids
        if not self._is_finished(name):
            if not name.isdigit() or int(name) >= len(ids):
                shown = ", ".join(ids[:3]) + (", …" if len(ids) > 3 else "")
                numbers = f"a number below {len(ids)} or an id" if ids else "it has none"
                raise BadInput(f"{self.path} has no trajectory '{name}': {numbers} ({shown})")
            name = ids[int(name)]
        return self._get(name)

    def ended(self) -> Iterator[Ended]:
        """How each trajectory ended, in the order of `ids`, without its tokens."""
        columns = [self.reader.column(f"trajectories/{name}").tolist() for name in ("status", "cause", "detail")]
        for name, *ending in zip(self._rows, *columns, strict=True):
            yield Ended(name, *map(str, ending))
        for name, record in zip(self._journalled, map(trajectory_from_body, self._journalled.values()), strict=True):
            yield Ended(name, record.status, record.cause, record.detail)

    def __iter__(self) -> Iterator[TrajectoryRecord]:
        return (self._get(name) for name in self.ids)

    def outlines(self) -> Iterator[TrajectoryOutline]:
        """The trajectories in order, those in the store without their tokens."""
        yield from map(self.reader.outline, self._rows.values())
        yield from self.recovered_records()

    def recovered_records(self) -> Iterator[TrajectoryRecord]:
        """Those that only the journal has."""
        return map(trajectory_from_body, self._journalled.values())

    def __len__(self) -> int:
        return self.stored + self.recovered

    def _is_finished(self, name: str) -> bool:
        return name in self._rows or name in self._journalled

    def _get(self, name: str) -> TrajectoryRecord:
        if name in self._rows:
            return self.reader.trajectory(self._rows[name])
        return trajectory_from_body(self._journalled[name])


def default_out(env: str, now: datetime) -> Path:
    """``runs/<env>-<date-time>.zarr``."""
    kind, _, rest = env.partition(":")
    name = kind if kind == "replay" or "." not in kind else rest
    return RUNS / f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}-{now:%Y%m%d-%H%M%S}.zarr"


def check_out(out: Path, mode: WriteMode) -> None:
    """Refuse, before the cluster starts, what the run writer would refuse later."""
    if not out.name.removesuffix(".zarr"):
        raise BadInput(f"--out {str(out)!r} names no run: give a path such as runs/RUN.zarr")
    try:
        _check_present(out, mode)
    except BadInput:
        raise
    except OSError as error:
        raise BadInput(f"cannot write a run to --out: {error.strerror}") from None
    _check_writable(out)


def _check_present(out: Path, mode: WriteMode) -> None:
    if mode in ("append", "resume"):
        if not out.exists():
            raise MissingRun(f"--{mode}: there is no run at {out}")
        RunReader(out)
    elif mode == "create":
        for path in (out, journal_path(out)):
            if path.exists() or path.is_symlink():
                raise BadInput(f"{path} exists: choose another --out, or use --append, --resume or --overwrite")
    elif out.exists() and not is_ours(out) and not (out.is_dir() and not any(out.iterdir())):
        raise BadInput(f"{out} is no run of heddle: it is not overwritten")


def _check_writable(out: Path) -> None:
    parent = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not parent.is_dir():
        raise BadInput(f"cannot write a run to {out}: {parent} is not a directory")
    try:
        # Try to write: permission bits do not show root's rights, nor a full or read-only file system.
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise BadInput(f"cannot write a run to {out}: {parent}: {error.strerror}") from None


def remove_if_empty(out: Path) -> bool:
    """Remove a new run in which no trajectory has begun, so that the same command can be given again.

    The run is locked meanwhile: a run that another process writes is left alone.
    """
    try:
        with RunStore.append_to(out) as store:
            run = StoredRun(out)
            if len(store) or len(run) or run.unfinished:
                return False
            shutil.rmtree(out)
            journal_path(out).unlink(missing_ok=True)
            return True
    except BadInput:
        return False  # it does not exist, or another process writes it
