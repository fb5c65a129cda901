"""The sample buffer of a run on disk: a log of its events, and a file for each batch.

Files in the folder of the run (`docs/training-data.md`):

- ``buffer.journal``: the events of `sample_buffer`, in the format of `records.journal`. The first record has the name
  of the first line of training.
- ``batches/step-000012.npz``: `batch_files`.

After a crash at any moment the buffer is rebuilt from the log; the tokens of groups that wait come from the store of
the run. The order of the writes makes this safe: the rows of a group are committed (or are in the journal of the run,
from which `records.store.recover` commits them) before its acceptance is logged; a batch is on disk before its event;
and only then is it given out. So a batch that was given out is given out unchanged. Its file stays until every
checkpoint that a restart may begin with has its step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from heddle_dask.core.errors import BadInput, WriteFailed
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.records.journal import Journal, JournalReader
from heddle_dask.records.reader import RunReader
from heddle_dask.training.batch_files import BATCHES, batch_path, save_batch
from heddle_dask.training.buffer_events import (
    BatchFormed,
    BatchTrained,
    BufferCounts,
    BufferedGroup,
    BufferEvent,
    GroupAccepted,
    GroupDropped,
    LineageBegan,
    event_from_body,
    event_to_body,
)
from heddle_dask.training.group_records import TOO_FEW, training_trajectory, trajectory_group
from heddle_dask.training.groups import (
    FinishedGroup,
    TrainingBatch,
    TrainingTrajectory,
    TrajectoryGroup,
    TruncatedAttempts,
)
from heddle_dask.training.sample_buffer import BatchRule, BatchWaits, SampleBuffer

BUFFER_LOG = "buffer.journal"

_BEGUN = "SamplesBegun"
_DURABLE = (BatchFormed, BatchTrained, LineageBegan)


class StoredSamples:
    """Make one with `create` or `reopen`; close it, or use `with`. One thread at a time; `draw` writes a file.

    Attributes
    ----------
    buffer
        What waits and runs. Change it by the methods of this class.
    """

    def __init__(self, folder: Path, log: Journal, buffer: SampleBuffer, groups: dict[str, TrajectoryGroup]) -> None:
        self._folder = folder
        self._log = log
        self.buffer = buffer
        self._groups = groups

    @classmethod
    def create(cls, folder: Path, rule: BatchRule, lineage: str) -> StoredSamples:
        """An empty buffer of a new run.

        Raises
        ------
        BadInput
            The folder has one, or cannot be written.
        """
        try:
            (folder / BATCHES).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"cannot write {folder}: {error.strerror or error}") from None
        log = Journal.create(folder / BUFFER_LOG)
        log.append(_BEGUN, {"lineage": lineage})
        log.sync()
        return cls(folder, log, SampleBuffer(rule, lineage), {})

    @classmethod
    def reopen(cls, folder: Path, rule: BatchRule, run: Path) -> StoredSamples:
        """The buffer as its log says; the files of open batches that are missing are written again.

        Parameters
        ----------
        run
            The store of the run, to which everything in its journal was recovered.

        Raises
        ------
        BadInput
            The log is missing or damaged, another process writes it, or the store lacks a trajectory that it names.
        """
        log = Journal.open_append(folder / BUFFER_LOG)
        try:
            events = _Events(folder / BUFFER_LOG)
            buffer = SampleBuffer.replayed(rule, events.lineage, events)
            restored = _Restored(run, rule.truncated)
            groups = {group.group_id: restored.group(group) for group in buffer.waiting}
            samples = cls(folder, log, buffer, groups)
            for batch in buffer.open_batches:
                if not samples._path(batch).exists():
                    taken = tuple(restored.group(events.accepted[group_id]) for group_id in batch.group_ids)
                    save_batch(TrainingBatch(batch.step, batch.lineage, taken), samples._path(batch))
            return samples
        except BaseException:
            log.close()
            raise

    @property
    def counts(self) -> BufferCounts:
        return self.buffer.counts

    @property
    def open_batches(self) -> tuple[Path, ...]:
        """Files of the batches that were not trained, oldest first: they are trained before others."""
        return tuple(self._path(batch) for batch in self.buffer.open_batches)

    def begin(self, group_id: str, first_version: int) -> None:
        self.buffer.begin(group_id, first_version)

    def end(self, group_id: str) -> None:
        self.buffer.end(group_id)

    def offer(self, finished: FinishedGroup, lineage: str) -> tuple[BufferEvent, ...]:
        """Take a delivered group or drop it; empty if it was offered before.

        Raises
        ------
        BadInput
            It has tokens that cannot be trained on (`group_records.trajectory_group`).
        WriteFailed
        """
        if self.buffer.knows(finished.group_id):
            self.buffer.end(finished.group_id)
            return ()
        earlier = self.buffer.rewards_of(finished.late_for) if finished.late_for else ()
        group = trajectory_group(finished, lineage, earlier, self.buffer.rule.truncated)
        if group is None:
            tokens = [record.generated_tokens for record in finished.records]
            return self.drop(finished.group_id, finished.environment, TOO_FEW, tokens)
        events = self._logged(self.buffer.offer(BufferedGroup.of(group)))
        if not any(isinstance(event, GroupDropped) for event in events):
            self._groups[group.group_id] = group
        return events

    def drop(
        self, group_id: str, environment: str, cause: str, sampled_tokens: Sequence[int] = ()
    ) -> tuple[BufferEvent, ...]:
        """Count a group that will not be delivered, such as a cancelled one (`SampleBuffer.drop`)."""
        return self._logged(self.buffer.drop(group_id, environment, cause, sampled_tokens))

    def draw(self) -> Path | BatchWaits:
        """Form the next batch and store it; returns its file, or why there is none yet.

        Raises
        ------
        NothingToLearn
        WriteFailed
            Nothing was formed.
        """
        for event in self._logged(self.buffer.evict()):
            if isinstance(event, GroupDropped):
                del self._groups[event.group_id]
        formed = self.buffer.draw()
        if isinstance(formed, BatchWaits):
            return formed
        path = self._path(formed)
        groups = tuple(self._groups[group_id] for group_id in formed.group_ids)
        save_batch(TrainingBatch(formed.step, formed.lineage, groups), path)
        self._logged(self.buffer.form(formed))
        for group_id in formed.group_ids:
            del self._groups[group_id]
        return path

    def trained(self, step: int) -> None:
        self._logged(self.buffer.trained(step))

    def forget_batches(self, through: int) -> None:
        """Remove the files of the batches up to this step."""
        for path in (self._folder / BATCHES).glob("step-*.npz"):
            if path < batch_path(self._folder / BATCHES, through + 1):
                path.unlink(missing_ok=True)

    def resume(self, version: PolicyVersion) -> None:
        """The training goes on from this checkpoint (`SampleBuffer.resume`); `open_batches` come first.

        Under another lineage, batches after it are given up where a file of them is missing.

        Raises
        ------
        BadInput
            It is no checkpoint of this run, or the file of a batch that is to be trained was deleted.
        """
        later = range(version.number + 1, self.buffer.next_step)
        missing = [path for step in later if not (path := batch_path(self._folder / BATCHES, step)).exists()]
        is_new = version.lineage != self.buffer.version.lineage
        if missing and not is_new:
            raise BadInput(f"cannot resume from {version}: {missing[0]} is missing: take a newer checkpoint")
        self._logged(self.buffer.resume(version, keeps_batches=not missing))

    def close(self) -> None:
        self._log.close()

    def __enter__(self) -> StoredSamples:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _path(self, batch: BatchFormed) -> Path:
        return batch_path(self._folder / BATCHES, batch.step)

    def _logged(self, events: tuple[BufferEvent, ...]) -> tuple[BufferEvent, ...]:
        """Write events down; what other processes depend on is on disk afterwards."""
        try:
            for event in events:
                self._log.append(*event_to_body(event))
            if any(isinstance(event, _DURABLE) for event in events):
                self._log.sync()
            else:
                self._log.flush()
        except OSError as error:
            raise WriteFailed.of(self._folder / BUFFER_LOG, error) from None
        return events


class _Events(Iterable[BufferEvent]):
    """The events of a log, and the groups that it accepted."""

    def __init__(self, path: Path) -> None:
        self.accepted: dict[str, BufferedGroup] = {}
        self._path = path
        first = next(iter(JournalReader(path)), None)
        if first is None or first.kind != _BEGUN:
            raise BadInput(f"{path} is no log of a sample buffer: give the folder of a training run")
        self.lineage = str(first.body["lineage"])

    def __iter__(self) -> Iterator[BufferEvent]:
        for record in JournalReader(self._path):
            if record.kind == _BEGUN:
                continue
            event = event_from_body(record.kind, record.body)
            if isinstance(event, GroupAccepted):
                self.accepted[event.group.group_id] = event.group
            yield event


class _Restored:
    """Groups from the store of a run."""

    def __init__(self, run: Path, truncated: TruncatedAttempts) -> None:
        self._run = run
        self._truncated = truncated
        self._reader: RunReader | None = None
        self._rows: dict[str, int] = {}

    def group(self, known: BufferedGroup) -> TrajectoryGroup:
        members = tuple(self._member(trajectory_id) for trajectory_id in known.trajectory_ids)
        group = TrajectoryGroup(
            known.group_id,
            known.task_id,
            known.environment,
            known.lineage,
            members,
            known.late_for,
            known.earlier_rewards,
        )
        if BufferedGroup.of(group) != known:
            raise BadInput(
                f"group {known.group_id} in {self._run} is not the one of the log: restore the run from a copy"
            )
        return group

    def _member(self, trajectory_id: str) -> TrainingTrajectory:
        if self._reader is None:
            self._reader = RunReader(self._run)
            ids = self._reader.column("trajectories/id").tolist()
            self._rows = {name: row for row, name in enumerate(ids)}
        row = self._rows.get(trajectory_id)
        member = None if row is None else training_trajectory(self._reader.trajectory(row), self._truncated)
        if member is None:
            raise BadInput(
                f"{self._run} lacks the trajectory {trajectory_id} that the log of the samples names: recover it from "
                "the journal of the run"
            )
        return member
