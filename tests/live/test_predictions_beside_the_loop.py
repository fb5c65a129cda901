"""Predictions of a session: beside the event loop, all that wait in one call, fits beside both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from worlds.core_builders import Stage

from heddle_dask.core.events import PredictionMade
from heddle_dask.live.scheduler.predictions import Predictions
from heddle_dask.predictors.contract import Fitted, Prediction
from heddle_dask.predictors.features import Finished, Progress
from heddle_dask.predictors.known import KnownWork, Oracle


class Slow(Oracle):
    """Each call and each fit waits for its event; keeps the trajectories of each call, and its thread."""

    def __init__(self) -> None:
        super().__init__(KnownWork())
        self.calls: list[list[str]] = []
        self.threads: set[int] = set()
        self.answer_now, self.fit_now, self.fitting = threading.Event(), threading.Event(), threading.Event()
        self.broken = False

    def predict(self, rows: Sequence[Progress]) -> list[Prediction]:
        self.calls.append([row.trajectory_id for row in rows])
        self.threads.add(threading.get_ident())
        assert self.answer_now.wait(30)
        if self.broken:
            raise ZeroDivisionError("of the predictor")
        return super().predict(rows)

    def due(self) -> bool:
        return True

    def fit(self) -> Fitted | None:
        self.fitting.set()
        assert self.fit_now.wait(30)
        return None


class Session:
    """Predictions without a scheduler."""

    def __init__(self) -> None:
        self.stage = Stage()
        self.stage.submit(*"abcd")
        self.predictor = Slow()
        self.answers: list[str] = []
        self.failures: list[str] = []
        self.predictions = Predictions(
            self.predictor, KnownWork(), self._take, self.failures.append, lambda: self.stage.at
        )

    def _take(self, made: PredictionMade) -> None:
        self.answers.append(made.trajectory_id)

    def ask(self, names: str) -> None:
        for name in names:
            self.predictions.ask(self.stage.trajectory(name))

    async def until(self, what: str) -> None:
        """Until these were answered."""
        async with asyncio.timeout(30):
            while self.answers != list(what):
                await asyncio.sleep(0.001)

    def close(self) -> None:
        self.predictor.answer_now.set()
        self.predictor.fit_now.set()
        self.predictions.close()


def test_all_that_wait_share_a_call_in_a_thread_while_the_loop_goes_on() -> None:
    async def body() -> None:
        session = Session()
        session.ask("a")
        async with asyncio.timeout(30):
            while not session.predictor.calls:
                await asyncio.sleep(0.001)  # the loop turns while the call waits
        session.ask("bcd")
        session.ask("c")
        assert session.answers == []
        session.predictor.answer_now.set()
        await session.until("abcd")
        assert session.predictor.calls == [["a"], ["b", "c", "d"]]
        assert threading.get_ident() not in session.predictor.threads
        session.close()

    asyncio.run(body())


def test_a_fit_delays_no_prediction() -> None:
    async def body() -> None:
        session = Session()
        session.predictor.answer_now.set()
        session.ask("a")
        await session.until("a")
        assert await asyncio.to_thread(session.predictor.fitting.wait, 30)
        assert not session.predictor.fit_now.is_set()
        session.ask("b")
        await session.until("ab")
        session.close()

    asyncio.run(body())


def test_a_predictor_that_fails_ends_the_session_with_its_story() -> None:
    async def body() -> None:
        session = Session()
        session.predictor.broken = True
        session.predictor.answer_now.set()
        session.ask("a")
        async with asyncio.timeout(30):
            while not session.failures:
                await asyncio.sleep(0.001)
        assert "of the predictor" in session.failures[0] and session.answers == []
        session.close()

    asyncio.run(body())


def test_what_has_ended_is_learnt_from_without_a_question() -> None:
    async def body() -> None:
        session = Session()
        told: list[Finished] = []
        session.predictor.observe_finished = told.append  # type: ignore[method-assign]
        session.predictor.answer_now.set()
        session.predictions.ended(session.stage.trajectory("a"), "completed")
        async with asyncio.timeout(30):
            while not told:
                await asyncio.sleep(0.001)
        assert [one.trajectory_id for one in told] == ["a"]
        session.close()

    asyncio.run(body())
