"""The classes that TRL's AsyncGRPOTrainer (experimental in trl 1.16) asks for: a rollout worker, a weight transfer.

``AsyncGRPOTrainer(rollout_worker=TrlRolloutWorker(…), weight_transfer=TrlWeightTransfer(…))``. The worker hands out the
sequences of finished groups; the transfer writes into a weight store, and engines fetch from there while they generate.
`following_engines.FollowingEngines` has both ends: ``groups`` and ``go_over``.

TRL counts its weight transfers from 1, the first one before any rollout (of a checkpoint, where it goes on from one),
and drops what is older than its ``max_staleness``. Versions have the same numbers here.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.training.advantages import AdvantageFunction, less_mean
from heddle_dask.training.groups import TrainingBatch, TrajectoryGroup
from heddle_dask.training.sample_rows import SampleRow, sample_rows
from heddle_dask.weights.model_directory import model_facts
from heddle_dask.weights.store import BucketWriter, WeightStore
from pipelines.any_trainer.raw_tensors import raw_tensor

_POLL_S: Final = 0.05


class WorkerStopped(RuntimeError):
    """The rollout worker produces nothing any more."""


class TrlRolloutWorker:
    """Implements TRL's ``RolloutWorkerProtocol``: sequences of groups on a queue, from a thread.

    Parameters
    ----------
    groups
        Called once, when the training begins: the groups, as long as there are any. Groups that cannot be learned from
        are not in it.
    decode
        Tokens to text, for TRL's traces.
    most_waiting
        Sequences on the queue; the thread waits beyond.
    """

    def __init__(
        self,
        groups: Callable[[], Iterable[TrajectoryGroup]],
        advantages: AdvantageFunction = less_mean,
        decode: Callable[[list[int]], str] = lambda ids: "",
        most_waiting: int = 1024,
    ) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(most_waiting)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.model_version = 0
        self._groups = groups
        self._advantages = advantages
        self._decode = decode
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heddle-trl-rollouts", daemon=True)
        self._failure: BaseException | None = None
        self._produced_s = time.monotonic()

    def start(self) -> None:
        self._produced_s = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it ends after the group that it waits for."""
        self._stopped.set()

    def update_model_version(self, model_version: int) -> None:
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise when no further sample will come, or none has come for so long.

        Raises
        ------
        WorkerStopped
        """
        if self._failure is not None:
            raise WorkerStopped(f"the rollout has failed: {self._failure}") from self._failure
        if not self._thread.is_alive() and self.rollout_buffer.empty():
            raise WorkerStopped("the rollout has ended: give it more tasks, or train fewer steps")
        silent_s = time.monotonic() - self._produced_s
        if silent_s > stale_after_s:
            raise WorkerStopped(f"the rollout has delivered no group for {silent_s:.0f} s")

    def _run(self) -> None:
        try:
            for number, group in enumerate(self._groups()):
                self._produced_s = time.monotonic()
                batch = TrainingBatch(group.first_version + 1, group.lineage, (group,))
                for row in sample_rows(batch, self._advantages):
                    if not self._put(self._sample(row, group, number)):
                        return
        except BaseException as error:
            self._failure = error

    def _put(self, sample: RolloutSample) -> bool:
        while not self._stopped.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=_POLL_S)
                return True
            except queue.Full:
                self._produced_s = time.monotonic()  # the trainer is slow, not the rollout
        return False

    def _sample(self, row: SampleRow, group: TrajectoryGroup, number: int) -> RolloutSample:
        first = int(np.argmax(row.trained))
        ids = row.token_ids.tolist()
        metrics = {"reward": row.reward, "truncated": float(row.truncated)} if row.first_of_trajectory else {}
        return RolloutSample(
            prompt=[{"role": "user", "content": self._decode(ids[:first])}],
            completion=[{"role": "assistant", "content": self._decode(ids[first:])}],
            input_ids=row.token_ids.astype(np.int64),
            completion_mask=row.trained.astype(np.int64),
            old_log_probs=np.where(row.trained, row.logprobs, np.float32(0.0)),
            advantage=row.advantage,
            # The oldest member's: a group is dropped as a whole.
            model_version=group.first_version,
            group_id=number,
            metrics=metrics,
            enqueued_at=time.time(),
        )


class TrlWeightTransfer:
    """Implements TRL's ``WeightTransferProtocol`` over a weight store.

    Parameters
    ----------
    model
        Model directory that the engines were started with, as the trainer: shape and tokenizer.
    go_over
        ``go_over(version, uri)``: tells the engines about published weights; may return before they have them.
    """

    def __init__(
        self, store: str, model: Path, go_over: Callable[[PolicyVersion, str], None], lineage: str = "trainer"
    ) -> None:
        self._store = WeightStore(store)
        self._model = model
        self._go_over = go_over
        self._lineage = lineage
        self._number = 0
        self._uri = ""

    def init_weight_transfer(self) -> None:
        """Refuse a store that cannot be written, before the training."""
        self._store.check_writable()

    def pause(self) -> None:
        """Nothing: engines pause when they install, for as long as that takes."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._number += 1
        writer = BucketWriter(self._store, PolicyVersion(self._lineage, self._number), model_facts(self._model))
        for name, tensor in iterator:
            writer.add(raw_tensor(name, tensor))
        self._uri = writer.publish()

    def resume(self) -> None:
        self._go_over(PolicyVersion(self._lineage, self._number), self._uri)

    def destroy(self) -> None:
        """Nothing is held."""
