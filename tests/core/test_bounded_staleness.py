"""The bound on staleness, event by event: credits, first steps, cancellations."""

from __future__ import annotations

from typing import Any

import pytest
from worlds.core_builders import Stage, trajectory_spec

from heddle_dask.core import events as ev
from heddle_dask.core.commands import AdmitTrajectory, CancelTrajectory, Command, StartStep
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import FIRST_RUN, EngineId, GroupId, PolicyVersion, RunId, TrajectoryId
from heddle_dask.core.run_description import REDUNDANT, STALE, RunDescription, StalenessBound
from heddle_dask.core.snapshot import staleness_counts
from heddle_dask.core.transitions import TrajectoryState


class BoundedStage(Stage):
    """A stage whose run has a bound, and engines with the weights with which the training begins."""

    def __init__(self, bound: StalenessBound, engines: int = 1, **more: Any) -> None:
        super().__init__(**more)
        self.feed(ev.RunStarted, RunDescription(staleness=bound))
        self.step(0)
        self.join(*(f"E{number + 1}" for number in range(engines)))

    def step(self, number: int, lineage: str = "a") -> list[Command]:
        return self.feed(ev.OptimizerStepEnded, FIRST_RUN, PolicyVersion(lineage, number))

    def group(self, name: str, members: int) -> list[Command]:
        return self.submit(*(f"{name}/{number}" for number in range(members)), group=name)

    def group_ended(self, name: str, accepted: int) -> list[Command]:
        return self.feed(ev.GroupEnded, FIRST_RUN, GroupId(name), accepted)

    def update(self, name: str, number: int) -> list[Command]:
        version = PolicyVersion("a", number)
        self.feed(ev.WeightsPublished, version, "store")
        self.feed(ev.SwitchRequested, version)
        self.feed(ev.WeightsFetched, EngineId(name), version)
        return self.feed(ev.WeightsInstalled, EngineId(name), version)

    def sample(self, name: str, index: int = 0) -> None:
        """A step of that trajectory, with the weights that its engine has."""
        step = self.generating(name, index)
        number = self.engine(step.engine_id).version.number
        self.feed(ev.StepFinished, step.step_id, step.engine_id, 10, 0, "stop", number)

    @property
    def account(self) -> tuple[int, int, int]:
        """Credits, accepted, running."""
        counts = staleness_counts(self.state, FIRST_RUN)
        assert counts is not None
        return counts.credits, counts.accepted, counts.running


def admitted(commands: list[Command]) -> list[str]:
    return [command.trajectory_id for command in commands if isinstance(command, AdmitTrajectory)]


def cancelled(commands: list[Command]) -> list[tuple[str, str]]:
    return [(c.trajectory_id, c.cause) for c in commands if isinstance(c, CancelTrajectory)]


@pytest.mark.parametrize("mode", ["cancel", "pace"])
def test_no_more_start_than_may_be_trained_in_time(mode: Any) -> None:
    stage = BoundedStage(StalenessBound(1, mode, 4))
    commands = [*stage.group("g", 4), *stage.group("h", 4), *stage.group("i", 4)]
    assert len(admitted(commands)) == 8, "(alpha + 1) B"
    assert stage.account == (0, 0, 8)
    for number in range(4):
        assert admitted(stage.end(f"g/{number}")) == [], "the group may be dropped, or not"
    assert admitted(stage.group_ended("g", 0)) == [f"i/{number}" for number in range(4)]
    for number in range(4):
        stage.end(f"h/{number}")
    assert stage.group_ended("h", 4) == []
    assert stage.account == (0, 4, 4)
    assert admitted(stage.group("j", 4)) == []
    assert len(admitted(stage.step(1))) == 4


def test_redundant_trajectories_run_beyond_the_credits() -> None:
    stage = BoundedStage(StalenessBound(0, "cancel", 2, redundant_trajectories=1))
    assert len(admitted(stage.group("g", 4))) == 4, "a group begins as a whole"
    stage.end("g/0")
    stage.end("g/1")
    assert cancelled(stage.feed(ev.TrajectoryRedundant, TrajectoryId("g/2"))) == [("g/2", REDUNDANT)]
    stage.late(ev.TrajectoryRedundant, TrajectoryId("g/2"))
    stage.late(ev.TrajectoryRedundant, TrajectoryId("gone"))
    stage.end("g/2")
    stage.group_ended("g", 2)
    assert stage.account == (0, 2, 1), "a late member counts until it ends"
    stage.end("g/3")
    assert stage.account == (1, 2, 0)
    stage.group_ended("g", -2)
    assert stage.account == (3, 0, 0), "what left the buffer untrained is asked for again"


def test_what_is_too_old_is_cancelled_with_its_group_and_takes_no_further_step() -> None:
    stage = BoundedStage(StalenessBound(1, "cancel", 4))
    stage.group("g", 2)
    stage.group("h", 2)
    stage.sample("g/0")
    stage.act("a", "g/1")
    assert cancelled(stage.step(1)) == []
    stage.update("E1", 1)
    stage.sample("h/0")
    assert cancelled(stage.step(2)) == [("g/0", STALE), ("g/1", STALE)]
    assert stage.request("g/0", 1) == []
    assert stage.trajectory("g/0").state is TrajectoryState.WAITING
    stage.placed("h/0", 1)
    counts = staleness_counts(stage.state, FIRST_RUN)
    assert counts is not None
    assert counts.cancelled == {STALE: 2}
    assert counts.ages == {1: 1}
    before = stage.account[2]
    stage.end("g/0")
    stage.end("g/1")
    assert stage.account[2] == before - 2, "no sample comes of them: their credits are free at once"


def test_pace_cancels_nothing() -> None:
    stage = BoundedStage(StalenessBound(0, "pace", 1))
    stage.group("g", 1)
    stage.sample("g/0")
    assert stage.step(1) == stage.step(2) == []
    assert isinstance(stage.placed("g/0", 1), StartStep)


def test_a_first_step_waits_for_weights_that_are_new_enough() -> None:
    stage = BoundedStage(StalenessBound(0, "cancel", 2), engines=2)
    stage.group("g", 2)
    stage.step(1)
    assert stage.request("g/0") == [], "it would be too old with its first token"
    (start,) = [c for c in stage.update("E2", 1) if isinstance(c, StartStep)]
    assert start.engine_id == "E2"
    assert stage.placed("g/1").engine_id == "E2"


def test_pace_begins_with_weights_that_suit_the_batch_of_the_group() -> None:
    stage = BoundedStage(StalenessBound(1, "pace", 1))
    for number, name in enumerate(("g", "h", "i")):
        stage.group(name, 1)
        assert bool(stage.state.unadmitted) is False
        if number < 2:
            stage.sample(f"{name}/0")
    stage.end("g/0")
    stage.group_ended("g", 1)
    assert admitted(stage.step(1)) == ["i/0"], "it is trained in the third step, at n = 2"
    assert stage.request("i/0") == []
    assert [c for c in stage.update("E1", 1) if isinstance(c, StartStep)]


def test_the_version_of_the_first_token_is_that_of_the_answer() -> None:
    stage = BoundedStage(StalenessBound(1, "cancel", 1))
    stage.group("g", 1)
    step = stage.generating("g/0")
    assert stage.trajectory("g/0").first_version == PolicyVersion()
    stage.update("E1", 1)
    stage.feed(ev.StepFinished, step.step_id, step.engine_id, 3, 0, "stop", 1)
    assert stage.trajectory("g/0").first_version == PolicyVersion("a", 1)
    assert cancelled(stage.step(2)) == []
    assert cancelled(stage.step(3)) == [("g/0", STALE)]


def test_a_branch_is_as_old_as_its_trajectory() -> None:
    stage = BoundedStage(StalenessBound(0, "cancel", 1))
    stage.group("g", 1)
    stage.sample("g/0")
    stage.update("E1", 1)
    stage.feed(ev.TrajectoryForked, trajectory_spec("g/0#1", 10, "g"), TrajectoryId("g/0"))
    stage.placed("g/0#1")
    assert stage.account[2] == 1, "a branch takes no credit"
    assert cancelled(stage.step(1)) == [("g/0", STALE)]


def test_what_another_line_of_training_has_begun_is_too_old() -> None:
    stage = BoundedStage(StalenessBound(3, "cancel", 2))
    stage.group("g", 1)
    stage.update("E1", 1)
    stage.sample("g/0")
    stage.end("g/0")
    stage.group_ended("g", 1)
    stage.group("h", 1)
    stage.sample("h/0")
    assert cancelled(stage.step(1, "b")) == [("h/0", STALE)]
    assert stage.account == (3 * 2 + 2 - 2, 1, 1), "what is in the buffer stays there"
    stage.late(ev.OptimizerStepEnded, FIRST_RUN, PolicyVersion("a", 2))


def test_a_run_without_a_bound_is_left_alone() -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("t")
    stage.finish(stage.generating("t"))
    stage.late(ev.OptimizerStepEnded, FIRST_RUN, PolicyVersion("a", 9))
    stage.late(ev.GroupEnded, RunId("7"), GroupId("g"), 1)
    assert isinstance(stage.placed("t", 1), StartStep)


@pytest.mark.parametrize("wrong", [{"redundant_trajectories": -1}, {"alpha": -1}, {"batch_trajectories": 0}])
def test_a_bound_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        StalenessBound(**wrong)
