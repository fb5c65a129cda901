"""Runs the prediction service beside the scheduler: its calls and fits run in threads, never on the event loop.

One thread predicts and learns, in order; another one fits, which takes seconds. An exception in either ends the
session.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.events import PredictionMade
from heddle_dask.predictors.contract import Fitted, Predictor
from heddle_dask.predictors.known import KnownWork
from heddle_dask.predictors.service import PredictionService


class Predictions:
    def __init__(
        self,
        predictor: Predictor,
        known: KnownWork,  # the oracle's totals, which the predictor was built with; `know` adds to them
        answer: Callable[[PredictionMade], None],  # takes each prediction, on the event loop
        fail: Callable[[str], None],  # takes the traceback of a failure
        now: Callable[[], float],  # the session's clock
    ) -> None:
        self._service = PredictionService(predictor)
        self._known = known
        self._answer = answer
        self._fail = fail
        self._now = now
        self._answers = ThreadPoolExecutor(1, thread_name_prefix="heddle-predict")
        self._fits = ThreadPoolExecutor(1, thread_name_prefix="heddle-fit")
        self._work: asyncio.Task[None] | None = None
        self._fitting: asyncio.Future[Fitted | None] | None = None

    def know(self, trajectory_id: str, tokens: float, tools_s: float, observed_tokens: float) -> None:
        """Add the true totals of a trajectory, for oracles."""
        if tokens > 0:
            self._known.tokens[trajectory_id] = tokens
            self._known.tools_s[trajectory_id] = tools_s
            self._known.observed_tokens[trajectory_id] = observed_tokens

    def ask(self, trajectory: Trajectory) -> None:
        """Predict as of now; requests that come while a call runs share the next call."""
        self._service.ask(trajectory, self._now())
        self._wake()

    def ended(self, trajectory: Trajectory, status: str) -> None:
        self._service.ended(trajectory, status, self._now())
        self._wake()

    def close(self) -> None:
        """Make no further prediction; the threads end by themselves."""
        if self._work is not None:
            self._work.cancel()
        self._answers.shutdown(wait=False, cancel_futures=True)
        self._fits.shutdown(wait=False, cancel_futures=True)

    def _wake(self) -> None:
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._service.has_work:
                await self._turn()
        except Exception:
            self._fail(traceback.format_exc())

    async def _turn(self) -> None:
        loop, batch = asyncio.get_running_loop(), self._service.take_batch()
        made = await loop.run_in_executor(self._answers, self._service.call, batch)
        for event in self._service.answers(batch, made, self._now()):
            self._answer(event)
        if self._service.begin_fit():
            self._fitting = loop.run_in_executor(self._fits, self._service.fit)
            self._fitting.add_done_callback(self._fitted)

    def _fitted(self, fitting: asyncio.Future[Fitted | None]) -> None:
        if fitting.cancelled():
            return
        if (error := fitting.exception()) is not None:
            self._fail("".join(traceback.format_exception(error)))
        else:
            self._service.end_fit(fitting.result())
