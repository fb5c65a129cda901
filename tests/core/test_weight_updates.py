"""Weight updates, event by event: what is fetched and installed when, and what moves meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from worlds.core_builders import Stage, engine_of

from heddle_dask.core import events as ev
from heddle_dask.core.commands import (
    Command,
    FetchWeights,
    InstallWeights,
    MoveContext,
    StartStep,
    WakeUp,
)
from heddle_dask.core.entities import Trajectory
from heddle_dask.core.errors import BadInput, GuardViolation
from heddle_dask.core.guards import check_kv_version
from heddle_dask.core.ids import EngineId, PolicyVersion
from heddle_dask.core.run_description import RunDescription, WeightUpdatePolicy
from heddle_dask.core.transitions import EngineState, WeightsState
from heddle_dask.core.view import MoveRequest

ONE, TWO, THREE = (PolicyVersion("a", number) for number in (1, 2, 3))


class TrainedStage(Stage):
    """A stage whose run publishes weights."""

    def __init__(self, policy: WeightUpdatePolicy | None = None, **more: Any) -> None:
        super().__init__(**more)
        self.feed(ev.RunStarted, RunDescription(weights=policy or WeightUpdatePolicy()))

    def publish(self, version: PolicyVersion) -> list[Command]:
        return self.feed(ev.WeightsPublished, version, f"store/{version}")

    def fetched(self, name: str, version: PolicyVersion, cause: str = "") -> list[Command]:
        return self.feed(ev.WeightsFetched, EngineId(name), version, cause)

    def switch(self, version: PolicyVersion) -> list[Command]:
        return self.feed(ev.SwitchRequested, version)

    def installed(self, name: str, version: PolicyVersion, cause: str = "") -> list[Command]:
        return self.feed(ev.WeightsInstalled, EngineId(name), version, 0.05, cause)

    def update(self, name: str, version: PolicyVersion) -> None:
        """All of it, for an engine that is told to fetch."""
        self.fetched(name, version)
        self.switch(version)
        self.installed(name, version)


def fetch(name: str, version: PolicyVersion) -> FetchWeights:
    return FetchWeights(EngineId(name), version, f"store/{version}")


def install(name: str, version: PolicyVersion, keep_kv: bool = False) -> InstallWeights:
    return InstallWeights(EngineId(name), version, keep_kv)


def test_engines_fetch_at_once_and_install_one_after_another_on_the_switch() -> None:
    stage = TrainedStage()
    stage.join("E1", "E2")
    assert stage.publish(ONE) == [fetch("E1", ONE), fetch("E2", ONE)]
    assert stage.fetched("E2", ONE) == []
    assert stage.switch(ONE) == [install("E2", ONE)]
    assert stage.fetched("E1", ONE) == [], "one at a time"
    assert stage.installed("E2", ONE) == [install("E1", ONE)]
    assert stage.installed("E1", ONE) == []
    assert {e.version for e in stage.state.engines.values()} == {ONE}


def test_all_at_once_and_as_soon_as_they_are_fetched() -> None:
    stage = TrainedStage(WeightUpdatePolicy("all-at-once", True, "when-fetched"))
    stage.join("E1", "E2")
    stage.publish(ONE)
    assert stage.fetched("E1", ONE) == [install("E1", ONE, True)]
    assert stage.fetched("E2", ONE) == [install("E2", ONE, True)]


def test_the_newest_version_replaces_what_is_under_way_and_older_ones_are_skipped() -> None:
    stage = TrainedStage()
    stage.join("E1", "E2")
    stage.publish(ONE)
    stage.fetched("E1", ONE)
    assert stage.publish(TWO) == [fetch("E1", TWO), fetch("E2", TWO)]
    stage.late(ev.WeightsFetched, EngineId("E2"), ONE)
    stage.late(ev.WeightsPublished, ONE, "store/again")
    assert stage.switch(ONE) == [], "what is at hand was given up for the newer one"
    assert stage.fetched("E1", TWO) == [install("E1", TWO)], "or a newer one"
    assert stage.publish(THREE) == [fetch("E2", THREE)], "an engine that installs fetches afterwards"
    assert stage.installed("E1", TWO) == [fetch("E1", THREE)]
    assert stage.fetched("E1", THREE) == [], "nobody asked for a switch to it"


def test_a_switch_that_comes_before_its_weights_counts() -> None:
    stage = TrainedStage()
    stage.join("E1")
    assert stage.switch(TWO) == []
    assert stage.publish(TWO) == [fetch("E1", TWO)]
    assert stage.fetched("E1", TWO) == [install("E1", TWO)]
    stage.late(ev.SwitchRequested, ONE)


def test_another_lineage_replaces_the_old_one_at_once_and_for_good() -> None:
    stage = TrainedStage()
    stage.join("E1")
    stage.publish(THREE)
    stage.update("E1", THREE)
    again = PolicyVersion("b", 1)
    assert stage.publish(again) == [fetch("E1", again)]
    assert stage.fetched("E1", again) == [install("E1", again)]
    stage.installed("E1", again)
    stage.late(ev.WeightsPublished, PolicyVersion("a", 9), "store/late")
    stage.late(ev.SwitchRequested, PolicyVersion("a", 9))
    assert stage.engine("E1").version == again
    assert stage.state.policy_version == 1


def test_an_engine_that_joins_behind_takes_no_step_before_it_has_caught_up() -> None:
    stage = TrainedStage()
    stage.join("E1")
    stage.publish(ONE)
    stage.update("E1", ONE)
    stage.submit("t")
    stage.lose("E1")
    stage.request("t")
    assert stage.feed(ev.EngineJoined, engine_of("E2")) == [fetch("E2", ONE)]
    assert stage.engine("E2").state is EngineState.LOADING
    assert stage.fetched("E2", ONE) == [install("E2", ONE)]
    (start,) = stage.installed("E2", ONE)
    assert isinstance(start, StartStep) and start.engine_id == "E2"
    current = replace(engine_of("E3"), lineage="a", policy_version=1)
    stage.feed(ev.EngineJoined, current)
    assert stage.engine("E3").state is EngineState.READY


def behind(newest: PolicyVersion, *, joins_with: PolicyVersion, gone: bool = False) -> TrainedStage:
    """E1 has version 2, `newest` is wanted too, and E2 joins."""
    stage = TrainedStage(WeightUpdatePolicy(install="when-fetched", max_fetches=2))
    stage.join("E1")
    for version in (ONE, TWO):
        stage.publish(version)
        stage.fetched("E1", version)
        stage.installed("E1", version)
    stage.publish(newest)
    if gone:
        stage.lose("E1")
    joining = replace(engine_of("E2"), lineage=joins_with.lineage, policy_version=joins_with.number)
    assert stage.feed(ev.EngineJoined, joining) == [fetch("E2", newest)]
    assert stage.engine("E2").state is EngineState.LOADING
    return stage


@pytest.mark.parametrize("gone", [False, True])
def test_an_engine_that_joins_loads_an_older_version_when_the_newest_cannot_be_fetched(gone: bool) -> None:
    stage = behind(THREE, joins_with=PolicyVersion(), gone=gone)
    stage.submit("t")
    if gone:
        stage.request("t")
    assert stage.fetched("E2", THREE, "corrupt") == [fetch("E2", TWO)], "at once: it does nothing meanwhile"
    assert stage.fetched("E2", TWO) == [install("E2", TWO)]
    begun = stage.installed("E2", TWO)
    assert stage.engine("E2").state is EngineState.READY
    assert [c.engine_id for c in begun if isinstance(c, StartStep)] == ["E2"] * gone
    assert fetch("E2", THREE) in begun, "it goes over to the newest as soon as that can be had"
    (wake,) = stage.fetched("E2", THREE, "corrupt")
    assert isinstance(wake, WakeUp)
    stage.fetched("E1", THREE, "corrupt")
    assert {engine.version for engine in stage.state.engines.values()} == {TWO}


def test_an_engine_that_joins_with_weights_of_the_lineage_takes_steps_when_it_can_get_no_newer_ones() -> None:
    stage = behind(THREE, joins_with=TWO)
    (wake,) = stage.fetched("E2", THREE, "corrupt")
    assert isinstance(wake, WakeUp)
    assert stage.engine("E2").state is EngineState.READY


def test_an_engine_that_joins_never_takes_steps_with_weights_of_another_lineage() -> None:
    newest = PolicyVersion("b", 1)
    stage = behind(newest, joins_with=TWO)
    waits = [stage.fetched("E2", newest, "corrupt")]
    (wake,) = waits[0]
    assert isinstance(wake, WakeUp)
    stage.at = wake.at_s
    assert stage.feed(ev.TimeReached) == [fetch("E2", newest)]
    assert stage.fetched("E2", newest, "corrupt") == []
    assert stage.engine("E2").state is EngineState.LOADING
    following = PolicyVersion("b", 2)
    assert fetch("E2", following) in stage.publish(following)
    assert stage.fetched("E2", following, "corrupt") == [fetch("E2", newest)]
    assert stage.fetched("E2", newest) == [install("E2", newest)]
    stage.installed("E2", newest)
    assert stage.engine("E2").state is EngineState.READY


def test_a_failed_fetch_is_repeated_later_and_a_few_times() -> None:
    stage = TrainedStage(WeightUpdatePolicy(max_fetches=3, retry_s=2.0))
    stage.join("E1")
    stage.publish(ONE)
    waits = []
    for _ in range(2):
        (wake,) = stage.fetched("E1", ONE, "no route")
        assert isinstance(wake, WakeUp)
        waits.append(wake.at_s - stage.at)
        assert stage.feed(ev.TimeReached) == [], "not yet"
        stage.at = wake.at_s
        assert stage.feed(ev.TimeReached) == [fetch("E1", ONE)]
    assert waits == [2.0, 4.0]
    assert stage.fetched("E1", ONE, "no route") == []
    weights = stage.engine("E1").weights
    assert (weights.state, weights.cause) == (WeightsState.FAILED, "no route")
    assert stage.engine("E1").state is EngineState.READY, "it goes on with what it has"
    assert stage.publish(TWO) == [fetch("E1", TWO)]


def test_a_failed_installation_lets_others_go_on() -> None:
    stage = TrainedStage()
    stage.join("E1", "E2")
    stage.publish(ONE)
    stage.fetched("E1", ONE)
    stage.fetched("E2", ONE)
    assert stage.switch(ONE) == [install("E1", ONE)]
    wake, other = stage.installed("E1", ONE, "out of memory")
    assert isinstance(wake, WakeUp)
    assert other == install("E2", ONE)
    assert stage.engine("E1").version == PolicyVersion()
    assert stage.lose("E2") == [], "an engine that is lost while it installs blocks nobody"
    assert stage.feed(ev.TimeReached) == [fetch("E1", ONE)]
    assert stage.fetched("E1", ONE) == [install("E1", ONE)]


def test_steps_stay_on_an_engine_that_installs() -> None:
    stage = TrainedStage()
    stage.join("E1")
    stage.submit("t", "u")
    step = stage.generating("t")
    stage.publish(ONE)
    stage.fetched("E1", ONE)
    stage.switch(ONE)
    assert stage.placed("u").engine_id == "E1"
    stage.installed("E1", ONE)
    stage.feed(ev.StepFinished, step.step_id, step.engine_id, 5, 0, "stop", 0)
    assert stage.trajectory("t").first_version == PolicyVersion()
    assert stage.trajectory("t").kv_version == ONE, "the engine has computed it again"


def resting(stage: Stage, name: str, engine_id: str) -> Trajectory:
    """A trajectory with its KV cache on that engine."""
    stage.submit(name)
    trajectory = stage.trajectory(name)
    stage.state.set_home(trajectory, EngineId(engine_id))
    stage.finish(stage.generating(name))
    stage.act(f"tool of {name}", name)
    return trajectory


def two_with_transfer(policy: WeightUpdatePolicy | None = None) -> TrainedStage:
    stage = TrainedStage(policy)
    for name in ("E1", "E2"):
        stage.feed(ev.EngineJoined, engine_of(name, kv_transfer=True))
    return stage


def test_no_kv_cache_moves_between_versions_and_none_while_an_engine_installs() -> None:
    stage = two_with_transfer()
    resting(stage, "t", "E1")
    stage.publish(ONE)
    stage.fetched("E2", ONE)
    assert stage.switch(ONE) == [install("E2", ONE)]
    assert stage.feed(ev.EngineDraining, EngineId("E1")) == [], "the move waits"
    (move,) = stage.installed("E2", ONE)
    assert isinstance(move, MoveContext)
    assert (move.kind, move.target_engine_id) == ("recompute", "E2")
    stage.feed(ev.MoveEnded, "t", EngineId("E2"), True, move.kind, 0.5, 100, "", EngineId("E1"))
    assert stage.trajectory("t").kv_version == ONE


@pytest.mark.parametrize("keep_kv", [False, True])
def test_an_installation_waits_for_the_move_that_uses_its_engine(keep_kv: bool) -> None:
    stage = two_with_transfer(WeightUpdatePolicy(keep_kv=keep_kv))
    resting(stage, "t", "E1")
    stage.publish(ONE)
    (move,) = stage.feed(ev.EngineDraining, EngineId("E1"))
    assert isinstance(move, MoveContext) and move.kind == "transfer"
    stage.fetched("E2", ONE)
    assert stage.switch(ONE) == []
    commands = stage.feed(ev.MoveEnded, "t", EngineId("E2"), True, "transfer", 0.5, 100, "", EngineId("E1"))
    assert install("E2", ONE, keep_kv) in commands
    stage.installed("E2", ONE)
    assert stage.trajectory("t").kv_version == PolicyVersion()
    assert stage.trajectory("t").home == "E2"


def test_the_guard_refuses_a_cache_of_another_version() -> None:
    stage = two_with_transfer()
    trajectory = resting(stage, "t", "E1")
    move = MoveRequest(trajectory.trajectory_id, EngineId("E1"), EngineId("E2"), "transfer", 1.0, 1)
    check_kv_version(stage.state, trajectory, move)
    stage.publish(ONE)
    stage.update("E2", ONE)
    with pytest.raises(GuardViolation, match="was written under version 0; E2 has version a:1"):
        check_kv_version(stage.state, trajectory, move)
    check_kv_version(stage.state, trajectory, replace(move, kind="recompute"))
    stage.fetched("E1", ONE)
    stage.installed("E1", ONE)
    with pytest.raises(GuardViolation):
        check_kv_version(stage.state, trajectory, move)


def test_an_engine_that_drains_is_left_alone() -> None:
    stage = TrainedStage()
    stage.join("E1", "E2")
    stage.submit("t")
    stage.generating("t")
    stage.publish(ONE)
    stage.fetched("E1", ONE)
    stage.feed(ev.EngineDraining, EngineId("E1"))
    assert stage.switch(ONE) == []
    assert stage.publish(TWO) == [fetch("E2", TWO)]


@pytest.mark.parametrize(
    "wrong",
    [{"order": "at random"}, {"install": "never"}, {"max_fetches": 0}, {"retry_s": -1.0}],
)
def test_a_policy_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="weight"):
        WeightUpdatePolicy(**wrong)
