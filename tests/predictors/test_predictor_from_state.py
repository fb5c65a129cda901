"""What the controller's records become for a predictor."""

from __future__ import annotations

import math
from dataclasses import replace

from worlds.core_builders import Stage, action_of, engine_of, identity

from heddle_dask.core import events as ev
from heddle_dask.core.commands import PredictRemaining, RunAction
from heddle_dask.core.entities import Trajectory
from heddle_dask.core.ids import GroupId, TrajectoryId
from heddle_dask.core.nouns import TrajectorySpec
from heddle_dask.predictors.features import RECENT
from heddle_dask.predictors.known import KnownWork, Oracle
from heddle_dask.predictors.service import finished_of, progress_of


def test_a_trajectory_that_waits_for_admission_has_not_begun() -> None:
    stage = Stage(overrides=["admission=at-most,alive=1"])
    stage.submit("a", "b")
    admitted, waiting = stage.trajectory("a"), stage.trajectory("b")
    assert progress_of(admitted, 100.0).elapsed_s == 100.0 - admitted.admitted_at
    assert progress_of(waiting, 100.0).elapsed_s == 0.0
    ended = finished_of(waiting, "aborted", 100.0)
    assert (ended.duration_s, ended.started_at_s, ended.censored) == (0.0, 100.0, True)


def test_a_trajectory_without_an_answer_has_the_newest_policy_that_an_engine_has() -> None:
    stage = Stage()
    stage.feed(ev.EngineJoined, replace(engine_of("E1"), policy_version=3))
    stage.submit("a")
    assert progress_of(stage.trajectory("a"), 1.0).policy_version == 3
    step = stage.generating("a")
    stage.feed(ev.StepFinished, *identity(step), 10, 0, "stop", 5)
    stage.submit("b")
    assert [progress_of(stage.trajectory(n), 9.0).policy_version for n in "ab"] == [5, 5]
    step = stage.placed("a", 1)
    stage.feed(ev.StepFinished, *identity(step), 0, 0, "abort", -1)
    stage.submit("c")
    versions = [progress_of(stage.trajectory(n), 9.0).policy_version for n in "ac"]
    assert versions == [5, 5], "an answer without tokens says nothing"


def test_progress_holds_the_last_steps_and_what_they_came_to() -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("a")
    for index in range(RECENT + 2):
        stage.finish(stage.placed("a", index), 10 + index)
    progress = progress_of(stage.trajectory("a"), 50.0)
    assert progress.step_tokens == tuple(10 + index for index in range(2, RECENT + 2))
    assert progress.steps_finished == RECENT + 2
    assert progress.generated_tokens == sum(10 + index for index in range(RECENT + 2))
    assert progress.prompt_tokens == 100, "the first prompt as it was sent"
    assert not math.isnan(progress.elapsed_s)


def test_of_a_tool_that_runs_its_label_is_known_and_not_its_time() -> None:
    stage = Stage()
    stage.join("E1")
    stage.add_host("H1")
    stage.submit("a")
    for index, context in enumerate((100, 160, 200)):  # 10 generated each; tools add 50 and 30
        stage.finish(stage.placed("a", index, context=context), 10)
        before = progress_of(stage.trajectory("a"), 50.0)
        (run,) = stage.act(f"x{index}", "a")
        during = progress_of(stage.trajectory("a"), 50.0)
        assert len(before.tool_labels) == index
        assert len(during.tool_labels) == index + 1
        assert math.isnan(during.tool_times_s[-1]) and during.tools_s == 0.5 * index
        assert isinstance(run, RunAction)
        stage.acted(run)
    after = progress_of(stage.trajectory("a"), 50.0)
    assert after.observed_tokens == (50, 30), "what the last tool adds is known at the next step"
    assert after.tool_times_s == (0.5, 0.5, 0.5)


def test_a_prediction_is_asked_for_when_a_tool_is_called_and_not_for_a_reward() -> None:
    stage = Stage("heddle", overrides=["admission=unlimited"])
    stage.join("E1")
    stage.submit("a")
    stage.finish(stage.placed("a"))
    asked = PredictRemaining(TrajectoryId("a"))
    assert stage.feed(ev.ActionRequested, action_of("x", "a")) == [asked]
    assert stage.feed(ev.ActionRequested, replace(action_of("y", "a"), kind="reward")) == []
    stage.late(ev.ActionRequested, action_of("z", "nobody"))


def test_what_tools_added_is_no_part_of_prompt_or_answers() -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("a")
    for index, context in enumerate((100, 160)):  # 10 generated, 50 added by a tool
        stage.finish(stage.placed("a", index, context=context), 10)
    assert finished_of(stage.trajectory("a"), "completed", 50.0).observed_tokens == 50


def test_a_trajectory_that_began_in_an_earlier_session_is_no_whole_example() -> None:
    stage = Stage()
    stage.join("E1")
    stage.feed(ev.TrajectorySubmitted, TrajectorySpec(TrajectoryId("a"), GroupId("g"), resumed_tokens=300))
    stage.finish(stage.generating("a", context=900), 10)
    assert finished_of(stage.trajectory("a"), "completed", 50.0).censored


def test_what_nobody_knows_is_told_without_nan() -> None:
    record = progress_of(_submitted(), 1.0)
    (told,) = Oracle(KnownWork({"a": 5.0})).predict([record])
    assert (told.tools_s, told.observation_per_token, told.observation_tokens) == (0.0, None, None)
    (told,) = Oracle(KnownWork(), observation_per_token=1.5).predict([record])
    assert told.observation_per_token == 1.5


def _submitted() -> Trajectory:
    stage = Stage()
    stage.submit("a")
    return stage.trajectory("a")


def test_an_oracle_hears_of_trajectories_that_come_later() -> None:
    known: dict[str, float] = {}
    oracle = Oracle(KnownWork(known))
    stage = Stage()
    stage.submit("late")
    record = stage.trajectory("late")
    assert isinstance(record.spec, TrajectorySpec)
    known["late"] = 70.0
    (answer,) = oracle.predict([progress_of(record, 1.0)])
    assert answer.tokens == 70.0
