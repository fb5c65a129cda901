"""A stored run, read from its store and its journal without changing either.

Trajectories that a killed driver had finished but not stored are in the journal; `heddle rollout --resume` or
``--append`` writes them to the store, reading never does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.files.run_writer import RESULTS, journal_path
from heddle_dask.records.causes import Ended
from heddle_dask.records.journal import JournalReader
from heddle_dask.records.reader import RunReader
from heddle_dask.records.trajectory import (
    TRAJECTORY_FINISHED,
    TrajectoryOutline,
    TrajectoryRecord,
    trajectory_from_body,
)


class StoredRun:
    """All finished trajectories of a run: first those in the store, then those only in the journal.

    Attributes
    ----------
    stored
        Trajectories in the store.
    recovered
        Trajectories that only the journal has.
    unfinished
        Trajectories with journalled steps or actions and no end.
    dropped_bytes
        Length of the journal's torn tail.

    Raises
    ------
    BadInput
        The path is no run, or its journal is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        journal = journal_path(self.path)
        # Opened before the store is read: what a writer then brings into the store and drops from the journal is read.
        lines = JournalReader(journal, RESULTS) if journal.exists() else None
        self._reader = RunReader(self.path)
        ids = [str(name) for name in self._reader.column("trajectories/id").tolist()]
        self._rows = {name: row for row, name in enumerate(ids)}
        self._journalled: dict[str, dict[str, Any]] = {}
        open_ids: dict[str, None] = {}
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
        """Metadata of the run: environment, model, options."""
        return self._reader.metadata

    @property
    def ids(self) -> list[str]:
        """Ids of the trajectories, in order."""
        return [*self._rows, *self._journalled]

    @property
    def begun(self) -> int:
        """Trajectories that have begun, finished or not."""
        return len(self) + self.unfinished

    def find(self, name: str) -> TrajectoryRecord:
        """A trajectory by its id, or by its number in the order of `ids`.

        Raises
        ------
        BadInput
            There is no such trajectory.
        """
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
        columns = [
            self._reader.column(f"trajectories/{name}").tolist() for name in ("status", "cause", "detail")
        ]
        for name, *ending in zip(self._rows, *columns, strict=True):
            yield Ended(name, *map(str, ending))
        for name, body in self._journalled.items():
            yield Ended(name, body["status"], body["cause"], body["detail"])

    def __iter__(self) -> Iterator[TrajectoryRecord]:
        return (self._get(name) for name in self.ids)

    def outlines(self) -> Iterator[TrajectoryOutline | TrajectoryRecord]:
        """The trajectories in order, those in the store without their tokens."""
        yield from map(self._reader.outline, self._rows.values())
        yield from map(trajectory_from_body, self._journalled.values())

    def __len__(self) -> int:
        return self.stored + self.recovered

    def _is_finished(self, name: str) -> bool:
        return name in self._rows or name in self._journalled

    def _get(self, name: str) -> TrajectoryRecord:
        if name in self._rows:
            return self._reader.trajectory(self._rows[name])
        return trajectory_from_body(self._journalled[name])
