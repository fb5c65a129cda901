"""Where a run's results go: the journal at once, the store in batches.

`RUN.zarr` is the store; the journal lies beside it as `RUN.journal`, since a Zarr group holds Zarr files only.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.continuation import check_continues
from heddle_dask.records.journal import Journal, read_journal
from heddle_dask.records.reader import RunReader
from heddle_dask.records.store import RunStore, recover
from heddle_dask.records.trajectory import TRAJECTORY_FINISHED, TrajectoryRecord, trajectory_to_body

WriteMode = Literal["create", "append", "overwrite", "resume"]
# A store append costs about the same for one trajectory as for fifty.
STORE_BATCH = 32
STORE_INTERVAL_S = 2.0


def journal_path(out: str | Path) -> Path:
    """The journal that belongs to the store at `out`.

    Raises
    ------
    BadInput
        The path has no name, such as ``/``.
    """
    out = Path(out)
    if not out.name:
        raise BadInput(f"{str(out)!r} names no run: give a path such as runs/RUN.zarr")
    return out.with_name(out.name.removesuffix(".zarr") + ".journal")


class RunWriter:
    """Owns the journal and the store of one run.

    Parameters
    ----------
    mode
        ``"create"`` refuses an existing path; ``"append"`` and ``"resume"`` first bring into the store what
        the journal of a killed driver holds.

    Raises
    ------
    BadInput
        The path exists, is missing, was not written by this package, cannot be written, or holds a run of another
        model, tokenizer, sampling or environment.
    """

    def __init__(self, out: str | Path, mode: WriteMode, metadata: Mapping[str, Any]) -> None:
        self.out = Path(out)
        self.batches = 0
        # The journal first: if it is locked or foreign, nothing of an older run is touched.
        self._journal = _open_journal(journal_path(out), mode)
        try:
            self._store = self._open_store(mode, metadata)
        except BaseException:
            self._journal.close()
            if mode == "create":
                self._journal.path.unlink()  # this writer has made it, and it is empty
            raise
        self._unstored: list[TrajectoryRecord] = []
        self._flush_due = False
        self._failure: BaseException | None = None
        self._storing = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def _open_store(self, mode: WriteMode, metadata: Mapping[str, Any]) -> RunStore:
        if mode in ("create", "overwrite"):
            return RunStore.create(self.out, metadata, overwrite=mode == "overwrite")
        store = RunStore.append_to(self.out)
        try:
            recorded = RunReader(self.out).metadata
            check_continues(self.out, recorded, metadata, resumes=mode == "resume")
            recover(self._journal.path, store)
        except BaseException:
            store.close()
            raise
        self.batches = int(recorded.get("batches", 0))
        return store

    def __contains__(self, trajectory_id: str) -> bool:
        """Whether the store holds this trajectory."""
        return trajectory_id in self._store

    def begin_batch(self) -> int:
        """Number of the batch that begins now, from 0, counted over all sessions that wrote here."""
        number = self.batches
        self.batches += 1
        self._store.update_metadata({"batches": self.batches})
        return number

    def recorded(self) -> list[tuple[str, dict[str, Any]]]:
        """What the journal held when it was opened."""
        return list(read_journal(self._journal.path))

    def journal(self, kind: str, body: dict[str, Any]) -> None:
        """Append to the journal; it is with the kernel before the event loop turns again.

        Raises
        ------
        OSError
            An earlier write failed (a full disk): the run must not go on unrecorded.
        """
        self._raise_failure()
        self._journal.append(kind, body)
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        try:
            self._journal.flush()
        except OSError as error:
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def finish(self, record: TrajectoryRecord) -> None:
        """Journal a finished trajectory now and store it soon.

        Raises
        ------
        OSError
            This or an earlier write failed.
        """
        self._raise_failure()
        self._journal.append(TRAJECTORY_FINISHED, trajectory_to_body(record))
        self._journal.flush()
        self._unstored.append(record)
        if len(self._unstored) >= STORE_BATCH:
            self._store_in_background()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(STORE_INTERVAL_S, self._store_in_background)

    def _store_in_background(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        task = asyncio.ensure_future(self.store())
        self._tasks.add(task)
        task.add_done_callback(self._stored)

    def _stored(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()

    async def store(self) -> None:
        """Bring everything finished into the store; the event loop goes on meanwhile.

        Raises
        ------
        OSError
            The disk refuses. The journal still holds the trajectories.
        """
        async with self._storing:
            batch, self._unstored = self._unstored, []
            try:
                if batch:
                    await asyncio.to_thread(self._store.append, batch)
            except OSError:
                self._unstored = [*batch, *self._unstored]
                raise

    def discard(self) -> None:
        """Close and remove both files: this writer made them, and no trajectory has begun."""
        self._journal.close()
        self._store.close()
        shutil.rmtree(self.out)
        self._journal.path.unlink(missing_ok=True)

    async def close(self) -> None:
        """Store the rest and close both files."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self.store()
        finally:
            self._journal.sync()
            self._journal.close()
            self._store.close()
        self._raise_failure()


def _open_journal(path: Path, mode: WriteMode) -> Journal:
    if mode in ("append", "resume") and path.exists():
        return Journal.open_append(path)
    return Journal.create(path, overwrite=mode == "overwrite")
