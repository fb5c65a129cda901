"""The prediction service: what shares a call, what is learnt, and when a fit runs."""

from __future__ import annotations

from collections.abc import Sequence

from worlds.core_builders import Stage

from heddle_dask.core.nouns import Prediction
from heddle_dask.predictors.contract import Fitted
from heddle_dask.predictors.features import Finished, Progress
from heddle_dask.predictors.known import KnownWork, Oracle
from heddle_dask.predictors.service import PredictionService


class Learner(Oracle):
    """Says how many trajectories its model knows; due after each one."""

    def __init__(self) -> None:
        super().__init__(KnownWork())
        self.told: list[str] = []
        self.running: list[str] = []
        self.model = 0

    def predict(self, rows: Sequence[Progress]) -> list[Prediction]:
        return [Prediction(float(self.model), float(self.model), "learner") for _ in rows]

    def observe_finished(self, finished: Finished) -> None:
        self.told.append(finished.trajectory_id)

    def observe_running(self, progress: Progress) -> None:
        self.running.append(progress.trajectory_id)

    def due(self) -> bool:
        return len(self.told) > self.model

    def fit(self) -> Fitted | None:
        return Fitted(len(self.told), rows=10 * len(self.told), told=len(self.told))

    def adopt(self, fitted: Fitted) -> None:
        self.model = fitted.model


def stage_and_service() -> tuple[Stage, Learner, PredictionService]:
    stage, predictor = Stage(), Learner()
    stage.submit(*"abc")
    return stage, predictor, PredictionService(predictor)


def test_what_waits_shares_a_call_and_the_latest_question_of_a_trajectory_counts() -> None:
    stage, predictor, service = stage_and_service()
    assert not service.has_work
    for name, at in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        service.ask(stage.trajectory(name), at)
    assert service.asked
    batch = service.take_batch()
    assert [(row.trajectory_id, row.at_s) for row in batch.rows] == [("a", 3.0), ("b", 2.0)]
    assert not service.has_work and not service.take_batch().rows
    answers = service.answers(batch, service.call(batch), 4.0)
    assert [(event.trajectory_id, event.at, event.prediction.source) for event in answers] == [
        ("a", 4.0, "learner"),
        ("b", 4.0, "learner"),
    ]
    assert predictor.running == ["a", "b"]


def test_a_trajectory_that_has_ended_is_learnt_from_and_not_asked_about() -> None:
    stage, predictor, service = stage_and_service()
    service.ask(stage.trajectory("a"), 1.0)
    service.ask(stage.trajectory("b"), 1.0)
    service.ended(stage.trajectory("a"), "completed", 2.0)
    batch = service.take_batch()
    assert [row.trajectory_id for row in batch.rows] == ["b"]
    assert [one.trajectory_id for one in batch.ended] == ["a"]
    service.call(batch)
    assert (predictor.told, predictor.running) == (["a"], ["b"])


def test_one_fit_at_a_time_and_the_old_model_answers_until_it_has_ended() -> None:
    stage, _, service = stage_and_service()
    assert not service.begin_fit(), "nothing was learnt"
    service.ended(stage.trajectory("a"), "completed", 1.0)
    assert not service.begin_fit(), "it has not reached the predictor"
    service.call(service.take_batch())
    assert service.begin_fit()
    fitted = service.fit()
    assert not service.begin_fit(), "a fit is under way"
    service.ask(stage.trajectory("b"), 2.0)
    assert [one.tokens for one in service.call(service.take_batch())] == [0.0]
    service.end_fit(fitted)
    service.ask(stage.trajectory("b"), 3.0)
    assert [one.tokens for one in service.call(service.take_batch())] == [1.0]
    assert not service.begin_fit(), "nothing more was learnt"


def test_a_fit_without_data_changes_nothing_and_may_be_tried_again() -> None:
    stage, predictor, service = stage_and_service()
    service.ended(stage.trajectory("a"), "aborted", 1.0)
    service.call(service.take_batch())
    assert service.begin_fit()
    service.end_fit(None)
    assert predictor.model == 0
    assert service.begin_fit()
