"""Where a training goes on: its newest checkpoint, the samples that wait, the line of training.

Whatever died (the trainer, the driver, both) left one of these states behind:

- a checkpoint whose step the sample buffer has not logged: the step is done, and is logged now;
- a batch on disk that was not trained: it is trained unchanged;
- steps that were done after the newest checkpoint: the trainer does them again, from the same stored batches. On a CPU
  that gives the same bits. On GPUs it may not; the weights keep their numbers all the same: they are as near to those
  that engines had as two runs of one step are, and every token has the logprob with which it was sampled. Where the
  resumed training has other options of learning, these steps are done with those of before;
- weights that were not published, or not installed everywhere: the loop publishes and installs them first;
- steps whose batches are missing as well, because somebody removed checkpoints: engines may have sampled with weights
  that do not exist any more. The training goes on under another lineage, so that the two are never taken for each
  other, and with new batches.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.core.value_types import read_from
from heddle_dask.records.store import RunStore, recover
from heddle_dask.training.batch_files import batch_path, load_batch
from heddle_dask.training.json_lines import read_lines
from heddle_dask.training.loop import LoopStart
from heddle_dask.training.run_directory import TrainingDirectory
from heddle_dask.training.sample_buffer import BatchRule
from heddle_dask.training.step_row import StepSeconds, step_row
from heddle_dask.training.stored_samples import BUFFER_LOG, StoredSamples
from heddle_dask.training.trainer import Trainer
from heddle_dask.training.trainer_spec import learning_options
from heddle_dask.weights.store import WeightStore


class OpenTrainer(Protocol):
    """Makes a trainer of a lineage that begins with a checkpoint (empty: with the model)."""

    def __call__(self, lineage: str, checkpoint: str, learning: Mapping[str, Any] = ..., /) -> Awaitable[Trainer]:
        """Make one. `learning`: options in place of those that are asked for."""
        ...


@dataclass(frozen=True, slots=True)
class OpenedTraining:
    trainer: Trainer
    samples: StoredSamples
    lineage: str
    start: LoopStart


async def begin_anew(directory: TrainingDirectory, rule: BatchRule, open_trainer: OpenTrainer) -> OpenedTraining:
    """The first process of a training."""
    lineage, checkpoint = directory.lineage()
    samples = StoredSamples.create(directory.path, rule, lineage)
    try:
        return OpenedTraining(await open_trainer(lineage, checkpoint), samples, lineage, LoopStart())
    except BaseException:
        samples.close()
        raise


async def go_on(
    directory: TrainingDirectory,
    rule: BatchRule,
    store: WeightStore,
    open_trainer: OpenTrainer,
    learning: Mapping[str, Any],
    journal: Path,
    note: Callable[[str], None] = lambda line: None,
) -> OpenedTraining:
    """A process after the first one.

    Parameters
    ----------
    learning
        What the resumed training asks for (`training.trainer_spec.learning_options`).
    journal
        That of the rollout, from which finished trajectories are recovered.
    note
        Takes a line where steps are done again, which takes a while.

    Raises
    ------
    BadInput
        What is in the directory does not fit together; the message says what is missing.
    """
    if not (directory.path / BUFFER_LOG).exists():  # it died before its first task
        return await begin_anew(directory, rule, open_trainer)
    if directory.rollout.exists():
        with RunStore.append_to(directory.rollout) as stored:
            recover(journal, stored)
    samples = StoredSamples.reopen(directory.path, rule, directory.rollout)
    try:
        trainer, version = await _trainer_of(directory, samples, store, open_trainer, learning, note)
        samples.resume(version)
        directory.forget_after(version.number)
        await _log_missing_step(directory, samples, trainer, version)
    except BaseException:
        samples.close()
        raise
    evaluated = frozenset(int(row["number"]) for row in read_lines(directory.evaluations))
    return OpenedTraining(trainer, samples, version.lineage, LoopStart(version.number, evaluated))


async def _trainer_of(
    directory: TrainingDirectory,
    samples: StoredSamples,
    store: WeightStore,
    open_trainer: OpenTrainer,
    learning: Mapping[str, Any],
    note: Callable[[str], None],
) -> tuple[Trainer, PolicyVersion]:
    lineage, checkpoint = directory.lineage()
    trainer = await open_trainer(lineage, checkpoint)
    state = await trainer.state()
    published = store.newest(lineage)
    trained = samples.buffer.version
    newest = max(
        0 if published is None else published.version.number,
        trained.number if trained.lineage == lineage else 0,
    )
    number = state.version.number
    if number >= newest:
        return trainer, state.version
    batches = [batch_path(directory.batches, step) for step in range(number + 1, newest + 1)]
    if all(path.exists() for path in batches):
        note(f"the trainer goes on from step {number}, its newest checkpoint; batches up to {newest} are trained again")
        version = PolicyVersion(lineage, newest)
        with read_from(directory.run_file):
            before = learning_options(directory.description()["asked"].get("learning", {}))
        if before == learning:
            await trainer.train(batches[-1], version)
            return trainer, version
        # Engines have had these weights: under their numbers there are no others.
        await trainer.close()
        trainer = await open_trainer(lineage, checkpoint, before)
        await trainer.train(batches[-1], version)
        await trainer.save(version)
        await trainer.close()
        return await open_trainer(lineage, checkpoint), version
    await trainer.close()
    checkpoint = "" if state.checkpoint is None else str(state.checkpoint)
    lineage = directory.begin_lineage(number, checkpoint)
    return await open_trainer(lineage, checkpoint), PolicyVersion(lineage, number)


async def _log_missing_step(
    directory: TrainingDirectory, samples: StoredSamples, trainer: Trainer, version: PolicyVersion
) -> None:
    """The row of a step that was done just before the driver died."""
    logged = max((int(row["step"]) for row in read_lines(directory.metrics)), default=0)
    path = batch_path(directory.batches, version.number)
    if version.number != logged + 1 or not path.exists():
        return
    report = await trainer.train(path, version)  # it was trained: this only asks for the report
    row = step_row(
        load_batch(path),
        report,
        samples.counts,
        wasted_tokens={},
        mix_sampled=samples.counts.sampled_groups,
        seconds=StepSeconds(train=sum(report.seconds.values())),
        elapsed_s=0.0,
        generated_tokens=0,
        held_out=max(read_lines(directory.evaluations), key=lambda each: int(each["number"]), default=None),
    )
    directory.add_metrics(row)


def check_store(store: WeightStore, own: Collection[str]) -> None:
    """Engines of this training would not take them, but two trainings must not prune one another's versions.

    Parameters
    ----------
    own
        Lineages of this training.

    Raises
    ------
    BadInput
        The store holds another lineage.
    """
    foreign = sorted(set(store.lineages()) - set(own))
    if foreign:
        raise BadInput(
            f"the weight store {store.uri} holds weights of another training ({foreign[0]}): give another --store, or "
            "go on with that training by --resume"
        )
