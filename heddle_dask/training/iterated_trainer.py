"""A trainer of the user's own, written as a loop over batches.

The training loop awaits `training.trainer.Trainer`; the user's code, in a thread, iterates. Asking for the next batch
says that the one before is trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.isolation.user_thread import on_own_thread
from heddle_dask.training.batch_files import load_batch
from heddle_dask.training.groups import TrainingBatch
from heddle_dask.training.trainer import TrainerState, TrainReport

_LEFT = "the loop over batches ended before the training: iterate until the batches end"


@dataclass(frozen=True, slots=True)
class _Order:
    """One batch that waits for the user's loop, and where its report goes."""

    path: Path
    version: PolicyVersion
    report: asyncio.Future[TrainReport]


class IteratedTrainer:
    """Implements `training.trainer.Trainer` for a loop of the user.

    In a thread of the user: ``for batch in trainer.batches(): …``. The loop ends when the training does. What the user
    raises there ends the training with that error.

    Parameters
    ----------
    version
        What the user's weights are at the beginning: 0 steps, or those of the checkpoint that they were loaded from.
    save
        ``save(version)`` writes a checkpoint of the current weights and returns its folder; called in the user's thread
        after every batch, before the batch counts as trained.
    publish
        ``publish(version, store)`` writes the current weights into the weight store and returns the URI of the
        manifest; called in a thread, while the user's loop waits for its next batch.
    keep
        ``keep(version, reward)``: this checkpoint is the best one so far by held-out reward; called in a thread.
    """

    def __init__(
        self,
        version: PolicyVersion,
        save: Callable[[PolicyVersion], Path],
        publish: Callable[[PolicyVersion, str], str],
        keep: Callable[[PolicyVersion, float], None] = lambda version, reward: None,
    ) -> None:
        self._state = TrainerState(version)
        self._save = save
        self._publish = publish
        self._keep = keep
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._metrics: dict[str, float] = {}
        self._lock = threading.Lock()
        self._ended = False
        self.doing = ""  # what of the user's runs now: ``"train"`` or ``"save"``; empty: it waits for a batch

    def batches(self) -> Iterator[TrainingBatch]:
        """The batches, one after another; waits for each. For one thread.

        Use `contextlib.closing`, or let the iteration end: a loop that is left is noticed when its iterator is closed.
        """
        while (order := self._orders.get()) is not None:
            try:
                self.doing = "train"
                yield load_batch(order.path)
                self.doing = "save"
                self._state = TrainerState(order.version, self._save(order.version))
            except BaseException as error:
                with self._lock:
                    self._ended = True
                left = isinstance(error, GeneratorExit)  # by the user
                _answer(order, BadInput(_LEFT) if left else error)
                raise
            self.doing = ""
            metrics, self._metrics = self._metrics, {}
            _answer(order, TrainReport(self._state, metrics))

    def log(self, metrics: Mapping[str, float]) -> None:
        """Report metrics of the batch that is being trained, in the user's thread."""
        self._metrics.update(metrics)

    async def state(self) -> TrainerState:
        return self._state

    async def train(self, batch: Path, version: PolicyVersion) -> TrainReport:
        """Give the batch to the user's loop, and wait until it asks for the next one.

        Raises
        ------
        BadInput
            The user's loop has ended.
        """
        if self._state.version == version:
            return TrainReport(self._state)
        order = _Order(batch, version, asyncio.get_running_loop().create_future())
        with self._lock:
            if self._ended:
                raise BadInput(_LEFT)
            self._orders.put(order)
        return await order.report

    async def publish(
        self,
        version: PolicyVersion,
        store: str,
        copied: Callable[[], None] = lambda: None,
        *,
        evaluated: bool = False,
    ) -> str:
        """The user's weights are published in place: the next batch waits."""
        return await on_own_thread(self._publish, version, store)

    async def keep_best(self, version: PolicyVersion, reward: float) -> None:
        await on_own_thread(self._keep, version, reward)

    async def save(self, version: PolicyVersion) -> TrainerState:
        """The user's `save` was called after each batch."""
        return self._state

    async def close(self) -> None:
        with self._lock:
            self._ended = True
            self._orders.put(None)


def _answer(order: _Order, answer: TrainReport | BaseException) -> None:
    """From the thread of the user to the event loop that waits."""

    def answered() -> None:
        if order.report.cancelled():
            return
        if isinstance(answer, TrainReport):
            order.report.set_result(answer)
        else:
            order.report.set_exception(answer)

    with contextlib.suppress(RuntimeError):  # it hung, and the training has ended without it
        order.report.get_loop().call_soon_threadsafe(answered)
