"""A trainer with two ranks on a worker tagged TRAINER: the same weights as in one process, whatever dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from distributed import Client, Worker
from safetensors.torch import load_file
from worlds.live_world import cluster, kill, run, worker_process
from worlds.training_batches import AGENT, training_batch

from heddle_dask import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.engines.model_services.spec import ServiceFailed
from heddle_dask.live.training.remote_trainer import RemoteTrainer
from heddle_dask.live.worker.trainer_host import PLUGIN_NAME
from heddle_dask.training.batch_files import batch_path, save_batch
from heddle_dask.training.trainer import Trainer
from heddle_dask.training.trainer_spec import TrainerSpec
from heddle_dask.weights.store import read_manifest
from pipelines.grpo.ranks import Ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(560)]


async def trainer_says(dask_worker: Worker) -> dict[str, Any]:
    """The state of the trainer, beside the order that it carries out."""
    host: Any = dask_worker.plugins[PLUGIN_NAME]
    answer: dict[str, Any] = {"training": 0}
    with contextlib.suppress(ServiceFailed):  # a new process is starting
        if host._process is not None:
            answer = await host._process.client.ask("GET", "/state")
    return answer


async def leaves(dask_worker: Worker) -> None:
    """What Dask calls of the host when its worker ends in good order."""
    await dask_worker.plugins[PLUGIN_NAME].teardown(dask_worker)


def resumes_when_it_is_lost(dask_worker: Worker) -> None:
    """Let a trainer that is given up run again at that moment."""
    process = dask_worker.plugins[PLUGIN_NAME]._process  # type: ignore[attr-defined]
    ended = process.ended

    async def given_up() -> str:
        cause: str = await ended()
        os.kill(process.process_id, signal.SIGCONT)
        assert await process.client.healthy()
        return cause

    process.ended = given_up


async def pid_in_the_middle_of(client: Client, number: int) -> int:
    """Pid of the trainer's first rank while it trains on a batch."""
    while True:
        for said in (await client.run(trainer_says)).values():
            if said["training"] == number:
                return int(said["pid"])
        await asyncio.sleep(0.01)


def store(folder: Path, number: int) -> Path:
    """A batch that takes seconds."""
    path = batch_path(folder, number)
    save_batch(training_batch(number, [[200, 150, 180, 120]] * 2), path)
    return path


def version(number: int) -> PolicyVersion:
    return PolicyVersion("a", number)


def check_weights(found: Path, expected: Path) -> None:
    left, right = load_file(found / "model.safetensors"), load_file(expected / "model.safetensors")
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=1e-4, atol=2e-6, msg=name)


def second_rank_of(pid: int) -> int:
    (rank,) = (child.pid for child in psutil.Process(pid).children() if "spawn_main" in " ".join(child.cmdline()))
    return rank


def gpus_of(pid: int) -> str:
    variables = dict(pair.partition("=")[::2] for pair in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return variables.get("CUDA_VISIBLE_DEVICES", "")


def test_two_ranks_train_as_one_and_go_on_after_deaths_of_trainer_and_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")  # which are not there: it trains on CPUs
    torch.set_num_threads(1)
    folders = {"checkpoints": str(tmp_path / "checkpoints"), "batches": str(tmp_path / "batches")}
    spec = TrainerSpec(str(AGENT), lineage="a", **folders, learning_rate=1e-5, adam_epsilon=1e-3, ranks=2)
    alone = Ranks(replace(spec, checkpoints=str(tmp_path / "alone"), ranks=1), tmp_path / "meeting")
    batches = [store(tmp_path / "batches", number) for number in (1, 2, 3)]
    expected = [alone.train(path, version(number)) for number, path in enumerate(batches, 1)]
    alone.save(model=True)

    lines: list[str] = []

    async def body() -> None:
        async with cluster(engines=0, tool_workers=0, trainers=1) as (_, client):
            missing = RemoteTrainer(client, replace(spec, model=str(tmp_path / "nothing")))
            with pytest.raises(BadInput, match=r"no readable config\.json") as refused:
                await missing.state()
            assert "\n" not in str(refused.value)

            with pytest.raises(BadInput, match=r"a trainer of 4 GPU\(s\) on .* finds 3 free"):
                await RemoteTrainer(client, replace(spec, ranks=4)).state()
            remote = RemoteTrainer(client, spec, lines.append)
            trainer: Trainer = remote
            assert (await trainer.state()).version == version(0)
            assert gpus_of(await remote.process_id()) == "4,5"
            assert await RemoteTrainer(client, spec).process_id() == await remote.process_id()
            shutil.copy(batches[1], tmp_path / batches[1].name)
            with pytest.raises(BadInput, match="does not follow a:0"):
                await trainer.train(tmp_path / batches[1].name, version(2))
            first = await trainer.train(batches[0], version(1))
            assert first.metrics["loss"] == pytest.approx(expected[0].metrics["loss"], rel=1e-3)
            assert first.metrics["tokens"] == expected[0].metrics["tokens"]

            await client.run(resumes_when_it_is_lost)
            second = asyncio.ensure_future(trainer.train(batches[1], version(2)))
            stopped = await pid_in_the_middle_of(client, 2)
            os.kill(stopped, signal.SIGSTOP)
            report = await second
            assert report.state.version == version(2) and await remote.process_id() != stopped
            (line,) = lines
            assert line.startswith("trainer grpo is lost: its process is stopped (SIGSTOP)")
            assert line.endswith("; another process is given the order train")
            again = await trainer.train(batches[1], version(2))
            assert (again.state, again.metrics) == (report.state, report.metrics), "a batch is trained once"

            await client.run(leaves)
            # The first rank answers, and waits for the other one for ever.
            watched = RemoteTrainer(client, replace(spec, silence_s=3.0), lines.append)
            await watched.state()
            lines.clear()
            third = asyncio.ensure_future(watched.train(batches[2], version(3)))
            stuck = await pid_in_the_middle_of(client, 3)
            os.kill(second_rank_of(stuck), signal.SIGSTOP)
            while not any("another process is given the order train" in line for line in lines):
                await asyncio.sleep(0.1)
            assert [line for line in lines if line.startswith("trainer grpo is lost: it made no progress with train")]
            while await pid_in_the_middle_of(client, 3) == stuck:
                await asyncio.sleep(0.1)
            kill(worker_process("trainer-0").pid)
            last = await third
            assert last.state.version == version(3)
            assert last.state.checkpoint is not None, "a host that leaves has one written"
            assert last.state.checkpoint.name == "step-000002"

            # Weights are published while the next batch is trained, and are those from before it.
            copied = asyncio.Event()
            publication = trainer.publish(version(3), str(tmp_path / "weights"), copied.set, evaluated=True)
            published = asyncio.ensure_future(publication)
            await copied.wait()
            fourth = asyncio.ensure_future(trainer.train(store(tmp_path / "batches", 4), version(4)))
            manifest = read_manifest(str(await published))
            assert manifest.version == version(3)
            assert (await fourth).state.version == version(4)
            assert await trainer.publish(version(3), str(tmp_path / "other"), copied.set) is None
            with pytest.raises(BadInput, match="cannot be published"):
                await trainer.publish(version(5), str(tmp_path / "weights"), copied.set)
            await trainer.keep_best(version(3), 0.7)
            checkpoints = tmp_path / "checkpoints"
            check_weights(checkpoints / "models" / "step-000003", tmp_path / "alone" / "models" / "step-000003")
            saved = await trainer.save(version(4))
            assert saved.checkpoint == checkpoints / "step-000004"
            assert {path.name for path in saved.checkpoint.glob("__*")} == {"__0_0.distcp", "__1_0.distcp"}
            await trainer.close()

            # One rank goes on from the shards of two.
            single = RemoteTrainer(client, replace(spec, ranks=1))
            assert (await single.state()).version == version(4)
            await single.export(tmp_path / "single")
            exact = load_file(tmp_path / "single" / "model.safetensors")
            kept = load_file(checkpoints / "models" / "step-000004" / "model.safetensors")
            assert all(torch.equal(tensor, exact[name]) for name, tensor in kept.items())
            await single.close()

    run(body(), hang_s=400)


def test_a_cluster_without_a_worker_for_it_says_so(tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster(engines=0, tool_workers=0) as (_, client):
            trainer = RemoteTrainer(client, TrainerSpec(str(AGENT), str(tmp_path), "a"))
            with pytest.raises(BadInput, match="no worker for a trainer"):
                await trainer.state()
            await trainer.close()

    run(body())
