"""Optimiser steps of a run, written in the form of another trainer.

The source is the folder of a training run, whose batches are exported as they were formed, or the store of any run,
whose groups become batches in the order in which they began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from heddle_dask.core.errors import BadInput, check_count
from heddle_dask.records.reader import RunReader
from heddle_dask.training.advantages import AdvantageFunction, less_mean
from heddle_dask.training.batch_files import batch_path, save_batch, stored_batches
from heddle_dask.training.exports.prime_rl import write_prime_rl_step
from heddle_dask.training.exports.verl import write_verl_step
from heddle_dask.training.group_records import trajectory_group
from heddle_dask.training.groups import FinishedGroup, TrainingBatch, TrajectoryGroup
from heddle_dask.training.sample_rows import SampleRow, sample_rows

FORMS = ("npz", "prime-rl", "verl")


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How batches are written.

    Attributes
    ----------
    form
        ``npz``: `batch_files`; ``prime-rl``, ``verl``: the modules of these names.
    """

    form: str
    advantages: AdvantageFunction = less_mean
    ranks: int = 1
    pad_token_id: int = 0


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and the groups of a stored run in which there is nothing to learn."""

    steps: int
    groups: int
    sequences: int
    tokens: int
    groups_left_out: int = 0


def export_batches(source: Path, out: Path, options: ExportOptions) -> Exported:
    """Export the batches of a training run, as they are stored.

    Raises
    ------
    BadInput
        `source` has none, `out` has a step of this name, or the form cannot hold them.
    WriteFailed
    """
    return _written(stored_batches(source), out, options)


def export_run(source: Path, out: Path, options: ExportOptions, groups_per_step: int) -> Exported:
    """Export the groups of a stored run, `groups_per_step` for each optimiser step; the last step may have fewer.

    Groups in which there is nothing to learn (`group_records`, or without variance) are left out and counted.

    Raises
    ------
    BadInput
        `source` is no run, no group of it can be learned from, or as `export_batches`.
    WriteFailed
    """
    check_count("groups per step", groups_per_step)
    groups = _Groups(RunReader(source))
    exported = _written(_as_batches(groups, groups_per_step), out, options)
    if not exported.steps:
        raise BadInput(f"{source} has no group with different rewards: there is nothing to learn from")
    return Exported(exported.steps, exported.groups, exported.sequences, exported.tokens, groups.left_out)


class _Groups:
    """The groups of a run that can be learned from, in the order of their first members; read one at a time."""

    def __init__(self, run: RunReader) -> None:
        self.left_out = 0
        self._run = run
        self._rows: dict[str, list[int]] = {}
        for row, group_id in enumerate(run.column("trajectories/group_id").tolist()):
            self._rows.setdefault(group_id, []).append(row)

    def __iter__(self) -> Iterator[TrajectoryGroup]:
        for group_id, rows in self._rows.items():
            records = tuple(self._run.trajectory(row) for row in rows)
            first = records[0]
            group = trajectory_group(FinishedGroup(group_id, first.task_id, first.environment, records), "")
            if isinstance(group, TrajectoryGroup) and group.has_variance:
                yield group
            else:
                self.left_out += 1


def _as_batches(groups: _Groups, size: int) -> Iterator[TrainingBatch]:
    taken: list[TrajectoryGroup] = []
    step = 1
    for group in groups:
        taken.append(group)
        if len(taken) == size:
            yield TrainingBatch(step, "", tuple(taken))
            step, taken = step + 1, []
    if taken:
        yield TrainingBatch(step, "", tuple(taken))


def _written(batches: Iterator[TrainingBatch], out: Path, options: ExportOptions) -> Exported:
    write = _writer(out, options)
    steps = groups = sequences = tokens = 0
    for batch in batches:
        rows = list(sample_rows(batch, options.advantages))
        write(batch, rows)
        steps += 1
        groups += len(batch.groups)
        sequences += len(rows)
        tokens += sum(int(row.trained.sum()) for row in rows)
    return Exported(steps, groups, sequences, tokens)


def _writer(out: Path, options: ExportOptions) -> Callable[[TrainingBatch, list[SampleRow]], None]:
    def npz(batch: TrainingBatch, rows: list[SampleRow]) -> None:
        path = batch_path(out, batch.step)
        if path.exists():
            raise BadInput(f"{path} exists: choose another folder")
        save_batch(batch, path)

    def prime_rl(batch: TrainingBatch, rows: list[SampleRow]) -> None:
        write_prime_rl_step(rows, out, batch.step, options.ranks)

    def verl(batch: TrainingBatch, rows: list[SampleRow]) -> None:
        write_verl_step(rows, out, batch.step, options.pad_token_id)

    writers = dict(zip(FORMS, (npz, prime_rl, verl), strict=True))
    if options.form not in writers:
        raise BadInput(f"no form {options.form!r} of batches: use {', '.join(FORMS)}")
    return writers[options.form]
