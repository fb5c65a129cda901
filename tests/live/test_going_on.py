"""Where a training goes on after a crash: which checkpoint, which line of training, which batches and rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from worlds.training_builders import finished_group

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.core.run_description import StalenessBound
from heddle_dask.live.training.going_on import OpenedTraining, go_on
from heddle_dask.training.batch_files import batch_path
from heddle_dask.training.json_lines import read_lines
from heddle_dask.training.run_directory import TrainingDirectory
from heddle_dask.training.sample_buffer import BatchRule
from heddle_dask.training.stored_samples import StoredSamples
from heddle_dask.training.trainer import TrainerState, TrainReport
from heddle_dask.training.trainer_spec import learning_options
from heddle_dask.weights.manifest import ModelFacts
from heddle_dask.weights.store import WeightStore
from heddle_dask.weights.tensor_files import RawTensor

RULE = BatchRule(1, StalenessBound(3, "cancel", 2))


@dataclass
class StoredTrainer:
    """A trainer whose newest checkpoint has `number` steps; it trains what it is given."""

    lineage: str
    number: int
    trained: list[tuple[str, int]]

    async def state(self) -> TrainerState:
        checkpoint = Path("checkpoints") / f"step-{self.number:06d}"
        return TrainerState(PolicyVersion(self.lineage, self.number), checkpoint)

    async def train(self, batch: Path, version: PolicyVersion) -> TrainReport:
        self.trained.append((batch.name, version.number))
        self.number = version.number
        return TrainReport(await self.state(), {"loss": 0.25}, {"train": 2.0})

    async def publish(
        self, version: PolicyVersion, store: str, copied: Callable[[], None] = print, *, evaluated: bool = False
    ) -> str:
        raise AssertionError("the loop publishes")

    async def keep_best(self, version: PolicyVersion, reward: float) -> None:
        raise AssertionError("the loop evaluates")

    async def save(self, version: PolicyVersion) -> TrainerState:
        self.trained.append(("saved", version.number))
        return await self.state()

    async def close(self) -> None:
        pass


def _directory(path: Path, *, formed: int, trained: int, published: int) -> TrainingDirectory:
    directory = TrainingDirectory(path)
    directory.begin({"steps": 9}, "create", "a")
    with StoredSamples.create(path, RULE, "a") as samples:
        for step in range(1, formed + 1):
            samples.offer(finished_group(f"g{step}", version=step - 1), "a")
            samples.draw()
            if step <= trained:
                samples.trained(step)
                directory.add_metrics({"step": step})
    tensor = RawTensor("w", "F32", (1,), np.zeros(1, np.float32))
    for number in range(1, published + 1):
        WeightStore(str(directory.weights)).write(PolicyVersion("a", number), [tensor], ModelFacts("digest"))
    return directory


def _go_on(
    directory: TrainingDirectory, checkpoint: int, trained: list[tuple[str, int]] | None = None
) -> tuple[OpenedTraining, list[tuple[str, str]]]:
    opened: list[tuple[str, str]] = []
    log = [] if trained is None else trained

    async def open_trainer(
        lineage: str, start: str, learning: Mapping[str, Any] = MappingProxyType({})
    ) -> StoredTrainer:
        opened.append((lineage, start))
        if learning:
            log.append((f"rate {learning['learning_rate']}", checkpoint))
        return StoredTrainer(lineage, checkpoint, log)

    store, journal = WeightStore(str(directory.weights)), directory.path / "no.journal"
    gone_on = asyncio.run(go_on(directory, RULE, store, open_trainer, learning_options({}), journal))
    gone_on.samples.close()
    return gone_on, opened


def test_a_batch_without_a_checkpoint_is_given_out_unchanged(tmp_path: Path) -> None:
    directory = _directory(tmp_path, formed=3, trained=2, published=2)
    before = batch_path(directory.batches, 3).read_bytes()
    opened, _ = _go_on(directory, checkpoint=2)
    assert (opened.lineage, opened.start.trained) == ("a", 2)
    assert opened.samples.open_batches == (batch_path(directory.batches, 3),)
    assert batch_path(directory.batches, 3).read_bytes() == before


def test_a_step_whose_checkpoint_was_not_logged_is_done_and_is_logged_now(tmp_path: Path) -> None:
    directory = _directory(tmp_path, formed=3, trained=2, published=2)
    opened, _ = _go_on(directory, checkpoint=3)
    assert (opened.lineage, opened.start.trained) == ("a", 3)
    assert opened.samples.open_batches == ()
    row = read_lines(directory.metrics)[-1]
    assert (row["step"], row["trainer"], row["seconds"]["train"]) == (3, {"loss": 0.25}, 2.0)


def test_steps_after_the_newest_checkpoint_are_done_again_and_logged_once(tmp_path: Path) -> None:
    directory = _directory(tmp_path, formed=4, trained=3, published=2)
    trained: list[tuple[str, int]] = []
    opened, trainers = _go_on(directory, checkpoint=1, trained=trained)
    assert trained == [("step-000003.npz", 3)], "the trainer itself trains those between"
    assert (opened.lineage, opened.start.trained, trainers) == ("a", 3, [("a", "")])
    assert [row["step"] for row in read_lines(directory.metrics)] == [1, 2, 3]
    assert opened.samples.open_batches == (batch_path(directory.batches, 4),)


def test_steps_are_done_again_with_the_options_of_learning_that_they_had(tmp_path: Path) -> None:
    directory = _directory(tmp_path, formed=4, trained=3, published=2)
    directory.changes({"steps": 9, "learning": {"learning_rate": 0.5, "checkpoint_every_s": 7, "alpha": 2}})
    trained: list[tuple[str, int]] = []
    opened, trainers = _go_on(directory, checkpoint=1, trained=trained)
    assert trained == [("rate 0.5", 1), ("step-000003.npz", 3), ("saved", 3)]
    assert (opened.start.trained, trainers) == (3, [("a", "")] * 3), "the last one has the options that are asked for"
    trained.clear()
    _go_on(directory, checkpoint=3, trained=trained)
    assert trained == [], "nothing is done again"


def test_a_step_that_was_done_again_and_was_not_logged_is_logged(tmp_path: Path) -> None:
    directory = _directory(tmp_path, formed=3, trained=3, published=2)
    directory.forget_after(2)
    _go_on(directory, checkpoint=1)
    assert [row["step"] for row in read_lines(directory.metrics)] == [1, 2, 3]


@pytest.mark.parametrize(("trained", "published"), [(2, 2), (2, 0)])
def test_an_older_checkpoint_without_its_batches_begins_another_line_of_training(
    tmp_path: Path, trained: int, published: int
) -> None:
    directory = _directory(tmp_path, formed=2, trained=trained, published=published)
    batch_path(directory.batches, 2).unlink()
    opened, trainers = _go_on(directory, checkpoint=1)
    assert (opened.lineage, opened.start.trained) == ("a.2", 1)
    assert trainers == [("a", ""), ("a.2", "checkpoints/step-000001")]
    # Step 2 is done again, with another batch.
    assert [row["step"] for row in read_lines(directory.metrics)] == [1]
    assert opened.samples.open_batches == () and opened.samples.buffer.next_step == 2
    # A crash before the first checkpoint of the new line: it is gone on with.
    again, trainers = _go_on(directory, checkpoint=1)
    assert again.lineage == "a.2"
    assert trainers == [("a.2", "checkpoints/step-000001")]
