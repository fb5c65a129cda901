"""From the stream of finished groups to batches: groups go into the sample buffer, batches come out as files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.records.token_record import TokenRecord
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.training.batch_files import load_batch
from heddle_dask.training.buffer_events import BufferCounts, BufferEvent, GroupDropped
from heddle_dask.training.groups import FinishedGroup, TrainingBatch
from heddle_dask.training.sample_buffer import BatchWaits
from heddle_dask.training.stored_samples import StoredSamples

TEXTS_PER_STEP: Final = 4
"""Trajectories of each batch that ``samples.jsonl`` shows."""


class SampleIntake:
    """The buffer of one training, fed by one stream."""

    def __init__(
        self,
        samples: StoredSamples,  # buffer and batches on disk; `close` closes it
        lineage: str,  # the line of training whose weights sample now
        # Takes how many groups left the buffer again because they became too old: others replace them.
        on_evicted: Callable[[int], None] = lambda groups: None,
    ) -> None:
        self._samples = samples
        self._lineage = lineage
        self._on_evicted = on_evicted
        self._changed = asyncio.Event()
        # One member of each group that waits, for people to read; empty for groups of an earlier process.
        self._shown: dict[str, TrajectoryRecord] = {}

    @property
    def counts(self) -> BufferCounts:
        """What became of the samples since the training began."""
        return self._samples.counts

    @property
    def counted(self) -> int:
        """Groups that were accepted for batches so far, and have not left the buffer as too old."""
        buffer = self._samples.buffer
        return (buffer.next_step - 1) * buffer.rule.groups + self._waiting

    @property
    def untrained_trajectories(self) -> int:
        """Of the groups in `counted`, those that no finished step has taken, in places of a batch."""
        rule, trained = self._samples.buffer.rule, self._samples.buffer.version.number
        return (self.counted - trained * rule.groups) * rule.bound.batch_trajectories // rule.groups

    @property
    def _waiting(self) -> int:
        """Whole groups in the buffer: late members come on top of a batch."""
        return sum(not group.late_for for group in self._samples.buffer.waiting)

    def begun(self, group_id: str, version: int) -> None:
        """A group has begun, with weights of this number or newer ones."""
        self._samples.begin(group_id, version)

    def dropped(self, group_id: str) -> None:
        self._samples.end(group_id)
        self._changed.set()

    def accepts(self, group: FinishedGroup) -> bool:
        """Offer a group to the buffer; whether it counts for a batch that it did not count for before.

        The trajectories of the group are journalled.

        Raises
        ------
        BadInput
            It has tokens that cannot be trained on.
        WriteFailed
        """
        events = self._samples.offer(group, self._lineage)
        is_taken = bool(events) and not _dropped(events)
        if is_taken and group.records:
            self._shown[group.group_id] = group.records[0]
        self._changed.set()
        return is_taken and not group.late_for

    async def batch(self, step: int) -> Path:
        """Wait until there are enough groups for this step; returns the file of the batch.

        A batch that was given out before a crash is given out again, unchanged.

        Raises
        ------
        NothingToLearn, WriteFailed
        """
        for path in self._samples.open_batches:
            if load_batch(path).step == step:
                return path
        while True:
            self._changed.clear()
            before = self.counted
            drawn = self._samples.draw()
            if before > self.counted:
                self._on_evicted(before - self.counted)
            if not isinstance(drawn, BatchWaits):
                return drawn
            await self._changed.wait()

    def trained(self, version: PolicyVersion) -> None:
        """The samples of this step are consumed."""
        self._samples.trained(version.number)

    def forget_batches(self, through: int) -> None:
        """Remove the batches up to this step: a checkpoint has what they gave, and their rows are logged."""
        self._samples.forget_batches(through)

    def texts(self, batch: TrainingBatch, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
        """Some trajectories of a batch as rows of ``samples.jsonl``, one of each of its first groups."""
        rows: list[dict[str, Any]] = []
        for group in batch.groups:
            record = self._shown.pop(group.group_id, None)
            if record is not None and len(rows) < TEXTS_PER_STEP:
                rows.append(
                    {
                        "step": batch.step,
                        "trajectory_id": record.trajectory_id,
                        "environment": record.environment,
                        "reward": record.reward,
                        "status": record.status,
                        "tokens": sum(step.generated_tokens for step in record.steps),
                        "text": _text(record.branches, decode),
                    }
                )
        # Others were evicted, or are shown no more.
        waiting = {group.group_id for group in self._samples.buffer.waiting}
        self._shown = {group_id: record for group_id, record in self._shown.items() if group_id in waiting}
        return rows

    def close(self) -> None:
        self._samples.close()


def _dropped(events: Iterable[BufferEvent]) -> bool:
    return any(isinstance(event, GroupDropped) for event in events)


def _text(branches: Sequence[TokenRecord], decode: Callable[[Sequence[int]], str]) -> str:
    return decode(branches[0].token_ids.tolist()) if branches else ""
