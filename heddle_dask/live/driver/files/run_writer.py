"""Where a run's results go: the journal at once, the store in batches.

`RUN.zarr` is the store; the journal lies beside it as `RUN.journal`, since a Zarr group holds Zarr files only.

The journal does not keep what the store has: when half of it is results of stored trajectories, and that is worth the
effort, it is rewritten without them. Lines of the controller stay, for ``heddle replay``.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput, WriteFailed
from heddle_dask.live.driver.files.continuation import check_continues, check_roots
from heddle_dask.live.driver.inputs.rollout_inputs import WriteMode
from heddle_dask.live.driver.programs.sandbox_roots import ROOT_LINE
from heddle_dask.records.journal import Compaction, Journal, JournalReader
from heddle_dask.records.journal_lines import RESULTS, JournalRecord
from heddle_dask.records.reader import RunReader
from heddle_dask.records.schema import counted
from heddle_dask.records.store import RunStore, recover
from heddle_dask.records.trajectory import TRAJECTORY_FINISHED, TrajectoryRecord, trajectory_to_body

# A store append costs about the same for one trajectory as for fifty.
STORE_BATCH = 32
STORE_INTERVAL_S = 2.0
# Less than this is not worth a rewrite.
COMPACTED_BYTES = 64 << 20


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
    WriteFailed
        The disk is full.
    """

    def __init__(self, out: str | Path, mode: WriteMode, metadata: Mapping[str, Any], *, accepts: bool = False) -> None:
        self.accepted: list[str] = []  # contents that have changed since, in words
        self._accepts = accepts
        self.out = Path(out)
        self.batches = 0
        self._facts: list[Mapping[str, Any]] = []
        self._sessions = 1
        self._resumed_context_tokens: int | None = None
        self._unstored: list[TrajectoryRecord] = []
        # Bytes that the journal holds of each trajectory, and of all those that the store has.
        self._bytes_of: dict[str, int] = {}
        self._stored_bytes = 0
        self._flush_due = False
        self._failure: BaseException | None = None
        self._storing = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        path = journal_path(out)
        # The journal first: if it is locked or foreign, nothing of an older run is touched.
        with self._failing(path):
            self._journal = _open_journal(path, mode)
        try:
            with self._failing(self.out):
                self._store = self._open_store(mode, metadata)
        except BaseException:
            self._journal.close()
            if mode == "create":
                path.unlink()  # this writer has made it, and it is empty
            raise
        if mode in ("append", "resume"):
            self._drop_what_is_stored()

    def _open_store(self, mode: WriteMode, metadata: Mapping[str, Any]) -> RunStore:
        if mode in ("create", "overwrite"):
            return RunStore.create(self.out, metadata, overwrite=mode == "overwrite")
        store = RunStore.append_to(self.out)
        try:
            recorded = RunReader(self.out).metadata
            resumes = mode == "resume"
            self.accepted = check_continues(self.out, recorded, metadata, resumes=resumes, accepts=self._accepts)
            roots = (body for _, body, _ in JournalReader(self._journal.path, {ROOT_LINE}))
            self.accepted += check_roots(self.out, roots, accepts=self._accepts)
            recover(self._journal.path, store)
            self.batches = counted(recorded, "batches", 0)
            self._facts = list(recorded.get("batch_facts", []))
            self._sessions = counted(recorded, "sessions", 1) + 1
        except BaseException:
            store.close()
            raise
        if mode == "resume":
            self._resumed_context_tokens = recorded.get("context_tokens")
        return store

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self._store

    def begin_batch(self, facts: Mapping[str, Any]) -> int:
        """Number of the batch that begins now, from 0, counted over all sessions that wrote here.

        Parameters
        ----------
        facts
            JSON-able: what the batch is made with.
        """
        number = self.batches
        self.batches += 1
        self._describe_batch(number, facts)
        return number

    def continue_batch(self, facts: Mapping[str, Any]) -> int:
        """Number of the last batch, which goes on with these facts."""
        number = self.batches - 1
        if facts != (self._facts[number] if number < len(self._facts) else {}):
            self._describe_batch(number, facts)
        return number

    def _describe_batch(self, number: int, facts: Mapping[str, Any]) -> None:
        # Batches of versions that stored no facts have none.
        self._facts[number:] = [*([{}] * (number - len(self._facts))), facts]
        with self._failing(self.out):
            self._store.update_metadata({"batches": self.batches, "batch_facts": self._facts})

    @property
    def journal_path(self) -> Path:
        return self._journal.path

    @property
    def stored(self) -> int:
        return len(self._store)

    def recorded(self) -> Iterator[JournalRecord]:
        """The journalled results of trajectories, one at a time."""
        return self.lines(RESULTS)

    def lines(self, kinds: Collection[str]) -> Iterator[JournalRecord]:
        """The journal's records of these kinds, one at a time."""
        return iter(JournalReader(self._journal.path, kinds))

    def learned(self, facts: Mapping[str, Any]) -> None:
        """Add to the metadata what the engines of the session have said, and that it is one more session.

        Raises
        ------
        BadInput
            Trajectories of the run that is resumed had a longer or shorter context.
        """
        before, now = self._resumed_context_tokens, facts["context_tokens"]
        if before is not None and before != now:
            raise BadInput(
                f"{self.out} was made with contexts of up to {before} tokens, and this session has {now}: it can "
                f"only be resumed with the same, max_context_tokens={before}"
            )
        with self._failing(self.out):
            self._store.update_metadata({**facts, "sessions": self._sessions})

    def journal(self, kind: str, body: dict[str, Any]) -> None:
        """Append to the journal; it is with the kernel before the event loop turns again.

        Raises
        ------
        WriteFailed
            This or an earlier write failed (a full disk): the run must not go on unrecorded.
        """
        self._raise_failure()
        with self._failing(self._journal.path):
            size_bytes = self._journal.append(kind, body)
        if kind in RESULTS:
            self._note_bytes(body["trajectory_id"], size_bytes)
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _note_bytes(self, trajectory_id: str, size_bytes: int) -> None:
        self._bytes_of[trajectory_id] = self._bytes_of.get(trajectory_id, 0) + size_bytes

    def _flush(self) -> None:
        self._flush_due = False
        with contextlib.suppress(WriteFailed), self._failing(self._journal.path):
            self._journal.flush()

    @contextlib.contextmanager
    def _failing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except BadInput:
            raise
        except OSError as error:
            self._failure = WriteFailed.of(path, error)
            raise self._failure from None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def finish(self, record: TrajectoryRecord) -> None:
        """Journal a finished trajectory now and store it soon.

        Raises
        ------
        WriteFailed
            This or an earlier write failed.
        """
        self._raise_failure()
        with self._failing(self._journal.path):
            size_bytes = self._journal.append(TRAJECTORY_FINISHED, trajectory_to_body(record))
            self._note_bytes(record.trajectory_id, size_bytes)
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
        WriteFailed
            The disk refuses. The journal still holds the trajectories.
        """
        async with self._storing:
            batch, self._unstored = self._unstored, []
            if not batch:
                return
            try:
                with self._failing(self.out):
                    await asyncio.to_thread(self._store.append, batch)
            except WriteFailed:
                self._unstored = [*batch, *self._unstored]
                raise
            self._stored_bytes += sum(self._bytes_of.pop(record.trajectory_id, 0) for record in batch)
            if self._is_worth_compacting():
                with self._failing(self._journal.path):
                    compaction = self._compaction()
                    await asyncio.to_thread(compaction.copy)
                    compaction.finish()
                self._stored_bytes = 0

    def _is_worth_compacting(self) -> bool:
        return self._stored_bytes >= max(COMPACTED_BYTES, self._journal.size_bytes // 2)

    def _compaction(self) -> Compaction:
        return Compaction(self._journal, RESULTS, lambda record: record.body["trajectory_id"] not in self._store)

    def _drop_what_is_stored(self) -> None:
        """Count what older sessions left in a long journal, and drop at once what is not needed."""
        if self._journal.size_bytes < COMPACTED_BYTES:
            return
        try:
            for record in self.recorded():
                if (name := record.body["trajectory_id"]) in self._store:
                    self._stored_bytes += record.size_bytes
                else:
                    self._note_bytes(name, record.size_bytes)
            if self._is_worth_compacting():
                with self._failing(self._journal.path):
                    compaction = self._compaction()
                    compaction.copy()
                    compaction.finish()
                self._stored_bytes = 0
        except BaseException:
            self._journal.close()
            self._store.close()
            raise

    def discard(self) -> None:
        """Close and remove both files: this writer made them, and no trajectory has begun."""
        self._journal.close()
        self._store.close()
        shutil.rmtree(self.out)
        self._journal.path.unlink(missing_ok=True)

    async def close(self) -> None:
        """Store the rest and close both files.

        Raises
        ------
        WriteFailed
            This or an earlier write failed. Both files are closed.
        """
        if self._timer is not None:
            self._timer.cancel()
        try:
            if self._failure is None:
                await self.store()
            with self._failing(self._journal.path):
                self._journal.sync()
        finally:
            self._journal.abandon()
            self._store.close()
        self._raise_failure()


def _open_journal(path: Path, mode: WriteMode) -> Journal:
    if mode in ("append", "resume") and path.exists():
        return Journal.open_append(path)
    return Journal.create(path, overwrite=mode == "overwrite")
