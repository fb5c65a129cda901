"""A trainer of the user as a loop over batches: what the training loop awaits, and what the user's thread sees."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from worlds.training_builders import finished_group

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.training.batch_files import batch_path, save_batch
from heddle_dask.training.group_records import trajectory_group
from heddle_dask.training.groups import TrainingBatch
from heddle_dask.training.iterated_trainer import IteratedTrainer


def store_batches(folder: Path, steps: int) -> list[Path]:
    paths = [batch_path(folder, step) for step in range(1, steps + 1)]
    for step, path in enumerate(paths, 1):
        save_batch(TrainingBatch(step, "a", (trajectory_group(finished_group(f"g{step}"), "a"),)), path)
    return paths


def make(tmp_path: Path, kept: list[tuple[int, float]] | None = None) -> IteratedTrainer:
    best = [] if kept is None else kept
    return IteratedTrainer(
        PolicyVersion("a", 0),
        save=lambda version: tmp_path / f"step-{version.number}",
        publish=lambda version, store: f"{store}/{version.number}",
        keep=lambda version, reward: best.append((version.number, reward)),
    )


def test_the_next_batch_says_that_the_one_before_is_trained(tmp_path):
    paths = store_batches(tmp_path, 2)
    kept: list[tuple[int, float]] = []
    trainer = make(tmp_path, kept)
    seen = []

    def user() -> None:
        for batch in trainer.batches():
            seen.append((batch.step, trainer._state.version.number))
            assert trainer.doing == "train"
            trainer.log({"loss": float(batch.step)})

    async def loop() -> None:
        thread = threading.Thread(target=user)
        thread.start()
        for number, path in enumerate(paths, 1):
            report = await trainer.train(path, PolicyVersion("a", number))
            assert report.metrics == {"loss": float(number)}
            assert report.state.checkpoint == tmp_path / f"step-{number}"
            assert await trainer.state() == report.state
            assert await trainer.publish(report.state.version, "store", lambda: None) == f"store/{number}"
            await trainer.keep_best(report.state.version, 0.5 * number)
        again = await trainer.train(paths[1], PolicyVersion("a", 2))  # as after a crash of the loop
        assert again.state.version == PolicyVersion("a", 2)
        await trainer.close()
        thread.join()

    asyncio.run(loop())
    assert seen == [(1, 0), (2, 1)]
    assert kept == [(1, 0.5), (2, 1.0)]


@pytest.mark.parametrize("ending", ["raises", "leaves"])
def test_an_end_of_the_users_loop_ends_the_training(tmp_path, ending):
    (path,) = store_batches(tmp_path, 1)
    trainer = make(tmp_path)

    def user() -> None:
        with contextlib.suppress(ZeroDivisionError), contextlib.closing(trainer.batches()) as batches:
            for _ in batches:
                if ending == "leaves":
                    break
                raise ZeroDivisionError("the user's")

    async def loop() -> None:
        thread = threading.Thread(target=user)
        thread.start()
        with pytest.raises(BadInput, match="ended before the training"):
            await trainer.train(path, PolicyVersion("a", 1))
        with pytest.raises(BadInput, match="ended before the training"):
            await trainer.train(path, PolicyVersion("a", 1))
        thread.join()

    asyncio.run(loop())


def test_what_save_raises_reaches_the_loop(tmp_path):
    (path,) = store_batches(tmp_path, 1)

    def save(version: PolicyVersion) -> Path:
        assert trainer.doing == "save"
        raise OSError("disk full")

    trainer = IteratedTrainer(PolicyVersion("a", 0), save, lambda version, store: "")

    def user() -> None:
        with contextlib.suppress(OSError):
            list(trainer.batches())

    async def loop() -> None:
        thread = threading.Thread(target=user)
        thread.start()
        with pytest.raises(OSError, match="disk full"):
            await trainer.train(path, PolicyVersion("a", 1))
        thread.join()

    asyncio.run(loop())


def test_a_save_or_publish_that_hangs_is_the_cause_and_keeps_no_process_alive(tmp_path):
    store_batches(tmp_path, 1)
    code = f"""
import asyncio, threading
from pathlib import Path
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.live.training import trainer_patience
from heddle_dask.training.batch_files import batch_path
from heddle_dask.training.iterated_trainer import IteratedTrainer
trainer_patience.LEAST_S, trainer_patience.TIMES = 0.1, 0.0
hang = lambda *_: threading.Event().wait()
version = PolicyVersion("a", 1)
async def train(trainer):
    patience = trainer_patience.TrainerPatience(lambda line: None, lambda: trainer.doing)
    patience._longest_s.update(train=0.0, publish=0.0)  # it has answered before
    await patience.of("publish", trainer.publish(version, "store", lambda: None))
    await patience.of("train", trainer.train(batch_path(Path({str(tmp_path)!r}), 1), version))
for save, publish in ((hang, lambda *_: "uri"), (lambda _: Path(), hang)):
    trainer = IteratedTrainer(PolicyVersion("a", 0), save, publish)
    threading.Thread(target=lambda: list(trainer.batches()), daemon=True).start()
    try:
        asyncio.run(train(trainer))
    except trainer_patience.TrainerSilent as error:
        print(error)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    told = [
        f"the trainer has not answered to {asked} for 0 s: look at it, then resume" for asked in ("save", "publish")
    ]
    assert (ended.returncode, ended.stdout.splitlines()) == (0, told), ended.stderr
