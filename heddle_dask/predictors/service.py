"""Schedules the calls and fits of a session's predictor; used by the live and the simulated body.

The service queues requests, batches them into calls, decides when a fit runs, and turns predictions into events. It
has no clock and no thread. The body runs `call` and `fit`: live in two executor threads, simulated in virtual time. A
fit takes seconds; the old model answers until `end_fit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.events import PredictionMade
from heddle_dask.core.ids import TrajectoryId
from heddle_dask.core.nouns import Prediction
from heddle_dask.predictors.contract import Fitted, Predictor
from heddle_dask.predictors.features import Finished, Progress
from heddle_dask.predictors.from_state import finished_of, progress_of


@dataclass(frozen=True, slots=True)
class PredictionBatch:
    """One call of the predictor: it learns from `ended`, then answers each of `rows`."""

    ended: tuple[Finished, ...]
    rows: tuple[Progress, ...]


class PredictionService:
    """Prediction requests, observations and fits of one predictor.

    `call` and `fit` may each run in a thread of their own; all other methods belong to one thread.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._waiting: dict[TrajectoryId, Progress] = {}
        self._ended: list[Finished] = []
        self._fitting = False

    @property
    def asked(self) -> bool:
        """Whether a prediction request waits."""
        return bool(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a prediction request, or a finished trajectory to learn from, waits for the next call."""
        return bool(self._waiting or self._ended)

    def ask(self, trajectory: Trajectory, at: float) -> None:
        """Request a prediction as of `at` seconds; replaces a waiting request of the same trajectory."""
        self._waiting[trajectory.trajectory_id] = progress_of(trajectory, at)

    def ended(self, trajectory: Trajectory, status: str, at: float) -> None:
        """Learn from a trajectory that ends at `at` seconds, and drop its waiting request.

        Answering the request would make the predictor count the trajectory as running for ever.
        """
        self._waiting.pop(trajectory.trajectory_id, None)
        self._ended.append(finished_of(trajectory, status, at))

    def take_batch(self) -> PredictionBatch:
        """Take everything that waits as the batch of the next call."""
        batch = PredictionBatch(tuple(self._ended), tuple(self._waiting.values()))
        self._ended, self._waiting = [], {}
        return batch

    def call(self, batch: PredictionBatch) -> list[Prediction]:
        """Run the predictor: one prediction per row of the batch. Takes milliseconds."""
        for one in batch.ended:
            self._predictor.observe_finished(one)
        for row in batch.rows:
            self._predictor.observe_running(row)
        return self._predictor.predict(batch.rows) if batch.rows else []

    @staticmethod
    def answers(batch: PredictionBatch, made: Sequence[Prediction], at: float) -> list[PredictionMade]:
        """The predictions of a call as events at `at` seconds, in the order of the rows."""
        return [
            PredictionMade(at, TrajectoryId(row.trajectory_id), row.steps_finished, one)
            for row, one in zip(batch.rows, made, strict=True)
        ]

    def begin_fit(self) -> bool:
        """Whether a fit is due and none is under way; if so, the body runs `fit` and then calls `end_fit`.

        Check it after each call, not after a fit: a fit that finds too little data stays due.
        """
        if self._fitting or not self._predictor.due():
            return False
        self._fitting = True
        return True

    def fit(self) -> Fitted | None:
        """Fit a new model, which is not in use yet; None without data. Takes seconds."""
        return self._predictor.fit()

    def end_fit(self, fitted: Fitted | None) -> None:
        """Answer with the new model from now on."""
        self._fitting = False
        if fitted is not None:
            self._predictor.adopt(fitted)
