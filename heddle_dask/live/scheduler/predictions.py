"""Runs the predictor beside the scheduler: many trajectories a call, in a thread, never on the event loop.

Two threads: one answers and listens, in order; one fits, which takes seconds. What either raises is our own failure
and ends the session.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.events import PredictionMade
from heddle_dask.core.ids import TrajectoryId
from heddle_dask.predictors.contract import Predictor
from heddle_dask.predictors.features import Finished, Progress
from heddle_dask.predictors.from_state import finished_of, progress_of
from heddle_dask.predictors.known import KnownWork


class Predictions:
    """One session's predictor.

    Parameters
    ----------
    known
        What the predictor was built with; `know` adds to it.
    answer
        Takes each prediction, on the event loop.
    fail
        Takes the story of a failure.
    now
        The session's clock.
    """

    def __init__(
        self,
        predictor: Predictor,
        known: KnownWork,
        answer: Callable[[PredictionMade], None],
        fail: Callable[[str], None],
        now: Callable[[], float],
    ) -> None:
        self._predictor = predictor
        self._known = known
        self._answer = answer
        self._fail = fail
        self._now = now
        self._waiting: dict[TrajectoryId, Progress] = {}
        self._ended: list[Finished] = []
        self._answers = ThreadPoolExecutor(1, thread_name_prefix="heddle-predict")
        self._fits = ThreadPoolExecutor(1, thread_name_prefix="heddle-fit")
        self._work: asyncio.Task[None] | None = None
        self._fitting: asyncio.Future[Any] | None = None

    def know(self, trajectory_id: str, tokens: float, tools_s: float, observed_tokens: float) -> None:
        """The true totals of a trajectory, for oracles."""
        if tokens > 0:
            self._known.tokens[trajectory_id] = tokens
            self._known.tools_s[trajectory_id] = tools_s
            self._known.observed_tokens[trajectory_id] = observed_tokens

    def ask(self, trajectory: Trajectory) -> None:
        """Predict as of now; trajectories that ask while a call runs share the next one."""
        self._waiting[trajectory.trajectory_id] = progress_of(trajectory, self._now())
        self._wake()

    def ended(self, trajectory: Trajectory, status: str) -> None:
        """Learn from a trajectory that ends now."""
        self._ended.append(finished_of(trajectory, status, self._now()))
        self._wake()

    def close(self) -> None:
        """Answer nothing more; threads end by themselves."""
        if self._work is not None:
            self._work.cancel()
        self._answers.shutdown(wait=False, cancel_futures=True)
        self._fits.shutdown(wait=False, cancel_futures=True)

    def _wake(self) -> None:
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._waiting or self._ended:
                await self._turn()
        except Exception:
            self._fail(traceback.format_exc())

    async def _turn(self) -> None:
        waiting, self._waiting = self._waiting, {}
        ended, self._ended = self._ended, []
        rows = list(waiting.values())
        loop = asyncio.get_running_loop()
        for event in await loop.run_in_executor(self._answers, self._predict, rows, ended):
            self._answer(event)
        self._fit_beside(loop)

    def _predict(self, rows: list[Progress], ended: list[Finished]) -> list[PredictionMade]:
        """In the answering thread."""
        for one in ended:
            self._predictor.observe_finished(one)
        for row in rows:
            self._predictor.observe_running(row)
        return [
            # `at` is set when it reaches the controller
            PredictionMade(0.0, TrajectoryId(row.trajectory_id), row.steps_finished, answer)
            for row, answer in zip(rows, self._predictor.predict(rows), strict=True)
        ]

    def _fit_beside(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._fitting is not None and not self._fitting.done():
            return
        self._fitting = loop.run_in_executor(self._fits, self._predictor.fit_if_due)
        self._fitting.add_done_callback(self._fitted)

    def _fitted(self, fitting: asyncio.Future[Any]) -> None:
        if not fitting.cancelled() and (error := fitting.exception()) is not None:
            self._fail("".join(traceback.format_exception(error)))
