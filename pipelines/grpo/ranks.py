"""The ranks of a trainer on one machine: this process is the first, and gives orders to the others."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.training.batch_files import batch_path
from heddle_dask.training.trainer import TrainerState, TrainReport
from heddle_dask.training.trainer_spec import TrainerSpec
from pipelines.grpo.checkpoint_folder import CheckpointFolder, CheckpointRecord
from pipelines.grpo.checkpoint_writer import CheckpointWriter
from pipelines.grpo.learner import Learner, check_spec
from pipelines.grpo.model_files import Weights, write_model
from pipelines.grpo.policy import device_of

Order = tuple[Literal["train"], str, PolicyVersion] | tuple[Literal["copy"]] | tuple[Literal["save"], str]
"""What all ranks do together."""


@dataclass(frozen=True, slots=True)
class CopiedWeights:
    """A copy of all trained weights in the host's memory, and whose they are."""

    record: CheckpointRecord
    weights: Weights


_JOIN = timedelta(minutes=10)


class Ranks:
    """A learner, and the same in every other rank. For one thread, but for `state`.

    Parameters
    ----------
    meeting
        A file that does not exist, by which the ranks find one another.
    """

    def __init__(self, spec: TrainerSpec, meeting: Path) -> None:
        check_spec(spec)
        self._spec = spec
        self._orders: list[Connection] = []
        if spec.ranks > 1:
            self._start_others(spec, meeting)
            join(spec, 0, meeting)
        self.learner = Learner(spec)
        self._folder = CheckpointFolder(Path(spec.checkpoints), spec.lineage, spec.keep_checkpoints)
        self._writer = CheckpointWriter(self._folder, spec.checkpoint_every_s)

    def _start_others(self, spec: TrainerSpec, meeting: Path) -> None:
        context = multiprocessing.get_context("spawn")
        ends = []
        for rank in range(1, spec.ranks):
            theirs, ours = context.Pipe(duplex=False)
            process = context.Process(target=follow, args=(spec.to_mapping(), rank, str(meeting), theirs), daemon=True)
            process.start()
            theirs.close()
            self._orders.append(ours)
            ends.append(process.sentinel)
        # A rank that is gone never comes back, and the others would wait for it: all end, and are started anew.
        threading.Thread(target=lambda: (wait(ends), os._exit(1)), daemon=True).start()

    @property
    def state(self) -> TrainerState:
        newest = self._folder.newest()
        checkpoint = newest[0] if newest else Path(self._spec.start) if self._spec.start else None
        return TrainerState(self.learner.version, checkpoint, self._folder.oldest_number)

    def train(self, batch: Path, version: PolicyVersion) -> TrainReport:
        """Train on a batch, after those since the newest checkpoint; one that was trained is only reported."""
        if version != self.learner.version:
            self._catch_up(batch.parent, version.number - 1)
            self._train(batch, version)
        record = self.learner.record
        return TrainReport(self.state, record.metrics, record.seconds)

    def _catch_up(self, batches: Path, number: int) -> None:
        """Train the stored batches up to this number again: what an earlier process trained, or was told to."""
        for step in range(self.learner.version.number + 1, number + 1):
            path = batch_path(batches, step)
            if not path.exists():
                return  # the learner says what it lacks
            print(f"trains batch {step} again: it is in no checkpoint", flush=True)
            self._train(path, PolicyVersion(self._spec.lineage, step))

    def _train(self, batch: Path, version: PolicyVersion) -> None:
        self._writer.check()
        self._tell(("train", str(batch), version))
        self.learner.train(batch, version)
        if self._writer.is_due():
            self._save()

    def _save(self) -> None:
        began_s = time.perf_counter()
        learner = self.learner
        directory = self._folder.begin(learner.record)
        self._tell(("save", str(directory)))
        self._writer.begins(learner.record, learner.save(directory))
        # What is left to do is done beside the next steps.
        seconds = {**learner.record.seconds, "checkpoint": time.perf_counter() - began_s}
        learner.record = replace(learner.record, seconds=seconds)

    def save(self, wanted: PolicyVersion | None = None, *, model: bool) -> TrainerState:
        """Write a checkpoint and, with `model`, its model directory, unless they are there; then both are on disk.

        Parameters
        ----------
        wanted
            After the stored batches that give these weights; None: of what it has.

        Raises
        ------
        BadInput
            It cannot have them.
        """
        if wanted is not None:
            self._reach(wanted, "saved")
        self._writer.wait()
        newest, version = self._folder.newest(), self.learner.version
        if version.number and (newest is None or newest[1].version != version):
            self._save()
            self._writer.wait()
        if model and version.number and not self._folder.has_model(version):
            self.write_model(self._copied())
        return self.state

    def weights_of(self, version: PolicyVersion) -> CopiedWeights | None:
        """A copy of these weights, after the stored batches that give them; None: it has newer ones.

        Raises
        ------
        BadInput
            It cannot have them.
        """
        learner = self.learner
        if version.lineage == learner.version.lineage and version.number < learner.version.number:
            return None
        self._reach(version, "published")
        return self._copied()

    def _reach(self, version: PolicyVersion, aim: str) -> None:
        if self._spec.batches:
            self._catch_up(Path(self._spec.batches), version.number)
        if version != self.learner.version:
            raise BadInput(f"version {version} cannot be {aim}: this trainer has {self.learner.version}")

    def _copied(self) -> CopiedWeights:
        self._tell(("copy",))
        return CopiedWeights(self.learner.record, self.learner.copied_weights())

    def write_model(self, copied: CopiedWeights) -> None:
        """Keep weights as a model directory; may run beside everything else."""
        policy = self.learner.policy
        self._folder.write_model(copied.record, lambda path: write_model(path, policy, copied.weights))

    def export(self, directory: Path) -> None:
        self.learner.export(directory, self._copied().weights)

    def keep_best(self, version: PolicyVersion, reward: float) -> Path:
        return self._folder.keep_best(version, reward)

    def _tell(self, order: Order) -> None:
        for orders in self._orders:
            orders.send(order)


def join(spec: TrainerSpec, rank: int, meeting: Path) -> None:
    """Become a member of the group of ranks."""
    # The ranks of one trainer are on one machine.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_of(spec, rank).type == "cuda" else "gloo",
        init_method=meeting.absolute().as_uri(),
        rank=rank,
        world_size=spec.ranks,
        timeout=_JOIN,
    )


def follow(mapping: dict[str, Any], rank: int, meeting: str, orders: Connection) -> None:
    """What the ranks but the first do: obey until the first one is gone."""
    spec = TrainerSpec.from_mapping(mapping)
    prepare_process(spec)
    join(spec, rank, Path(meeting))
    learner = Learner(spec, rank)
    _obey(learner, orders.recv)


def _obey(learner: Learner, next_order: Callable[[], Order]) -> None:
    while True:
        try:
            order = next_order()
        except EOFError:
            return
        try:
            match order:
                case "train", batch, version:
                    learner.train(Path(batch), version)
                case "save", directory:
                    learner.save(Path(directory))
                case _:
                    learner.copied_weights()
        except BadInput:
            continue  # the first rank says so


def prepare_process(spec: TrainerSpec) -> None:
    """Set what is of the whole process: CPU threads, and that the same batches give the same bits."""
    torch.set_num_threads(spec.threads or max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    if device_of(spec, 0).type == "cpu":
        torch.use_deterministic_algorithms(True)
