"""The ranks of a trainer on one machine: this process is the first, and gives orders to the others."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.training.trainer import TrainReport
from heddle_dask.training.trainer_spec import TrainerSpec
from pipelines.grpo.learner import Learner, check_spec
from pipelines.grpo.policy import device_of

_JOIN = timedelta(minutes=10)


class Ranks:
    """A learner, and the same in every other rank.

    Parameters
    ----------
    meeting
        A file that does not exist, by which the ranks find one another.
    """

    def __init__(self, spec: TrainerSpec, meeting: Path) -> None:
        check_spec(spec)
        self._orders: list[Connection] = []
        if spec.ranks > 1:
            self._start_others(spec, meeting)
            join(spec, 0, meeting)
        self.learner = Learner(spec)

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

    def train(self, batch: Path, version: PolicyVersion) -> TrainReport:
        for orders in self._orders:
            orders.send((str(batch), version))
        self.learner.catch_up()
        return self.learner.train(batch, version)


def join(spec: TrainerSpec, rank: int, meeting: Path) -> None:
    """Become a member of the group of ranks."""
    # The ranks of one trainer are on one machine.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if device_of(spec, rank).type == "cuda" else "gloo",
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


def _obey(learner: Learner, next_order: Callable[[], Any]) -> None:
    while True:
        try:
            batch, version = next_order()
        except EOFError:
            return
        learner.catch_up()
        try:
            learner.train(Path(batch), version)
        except BadInput:
            continue  # the first rank says so


def prepare_process(spec: TrainerSpec) -> None:
    """Set what is of the whole process: CPU threads, and that the same batches give the same bits."""
    torch.set_num_threads(spec.threads or max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    if device_of(spec, 0).type == "cpu":
        torch.use_deterministic_algorithms(True)
