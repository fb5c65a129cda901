"""The process of a trainer: weights are published beside a batch, and a process after it does again what is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from worlds.trainer_process import TrainerProcess, trainer_process
from worlds.training_batches import AGENT, stored_batch, training_batch

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.live.training.remote_trainer import RemoteTrainer
from heddle_dask.training.batch_files import batch_path, save_batch
from heddle_dask.weights.store import WeightStore


def version(number: int) -> PolicyVersion:
    return PolicyVersion("a", number)


def orders_to(process: TrainerProcess) -> RemoteTrainer:
    """A remote trainer without a cluster between."""
    remote = RemoteTrainer(Mock(), Mock())
    remote._ask = process.ask  # type: ignore[method-assign]
    return remote


def published(store: Path, number: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in (store / "a" / f"{number:08d}").glob("*.safetensors"):
        found |= load_file(path)
    return found


def test_weights_are_published_beside_a_batch_and_lost_steps_are_done_again(tmp_path: Path) -> None:
    folder, store = tmp_path / "trainer", tmp_path / "weights"
    batches = [stored_batch(tmp_path, number) for number in (1, 2)]
    save_batch(training_batch(3, [[200, 150, 180, 120]] * 2), batch_path(tmp_path, 3))
    options: dict[str, Any] = {"learning_rate": 1e-3, "batches": str(tmp_path)}

    async def first(process: TrainerProcess) -> None:
        trainer = orders_to(process)
        for number, path in enumerate(batches, 1):
            report = await trainer.train(path, version(number))
            assert (report.state.version, report.state.checkpoint) == (version(number), None)
        copied = asyncio.Event()
        publication = asyncio.ensure_future(trainer.publish(version(2), str(store), copied.set, evaluated=True))
        await copied.wait()
        third = asyncio.ensure_future(trainer.train(batch_path(tmp_path, 3), version(3)))
        uri = await publication
        assert not third.done(), "a batch is trained meanwhile"
        assert uri == WeightStore(str(store)).manifest_uri(version(2))
        await trainer.keep_best(version(2), 0.5)
        process.process.kill()
        with pytest.raises(Exception, match=r"[Dd]isconnect|closed|reset"):
            await third

    async def second(process: TrainerProcess) -> None:
        trainer = orders_to(process)
        assert (await trainer.state()).version == version(0), "its time for a checkpoint had not come"
        other = tmp_path / "other"
        assert await trainer.publish(version(2), str(other)) is not None
        left, right = published(store, 2), published(other, 2)
        assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
        report = await trainer.train(batch_path(tmp_path, 3), version(3))
        assert report.state.version == version(3)
        assert await trainer.publish(version(2), str(tmp_path / "late")) is None, "it has newer ones"
        state = await trainer.save(version(3))
        assert state.checkpoint is not None and (state.checkpoint.name, state.kept_from) == ("step-000003", 3)

    async def third(process: TrainerProcess) -> None:
        trainer = orders_to(process)
        assert (await trainer.state()).version == version(3)
        await trainer.export(tmp_path / "model")
        models = folder / "checkpoints" / "models"
        assert {path.name for path in models.iterdir()} == {"step-000002", "step-000003"}
        exported, kept = (
            load_file(tmp_path / "model" / "model.safetensors"),
            load_file(models / "step-000003" / "model.safetensors"),
        )
        assert all(torch.equal(exported[name], kept[name]) for name in exported)

    for scenario in (first, second, third):
        with trainer_process(AGENT, folder, "a", **options) as process:
            asyncio.run(scenario(process))
