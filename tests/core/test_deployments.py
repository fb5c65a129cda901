"""TP degrees as lists of events and commands: requests, plans, stale plans, and plans that the guard refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from worlds.core_builders import Stage, engine_of

from heddle_dask.core import events as ev
from heddle_dask.core.commands import DeployEngines, PlanDegrees
from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import GuardViolation
from heddle_dask.core.ids import EngineId, GroupId, TrajectoryId
from heddle_dask.core.journal_codec import replay
from heddle_dask.core.nouns import DegreeRequest, FinishedWork, NodeGpus, TpDegreePlan, TrajectorySpec
from heddle_dask.strategies.presets import build_strategies

NODE = DegreeRequest(
    request_id=1,
    nodes=(NodeGpus(4, 4),),
    candidates=(4, 2, 1),
    start_s=((1, 3.0),),
    trajectories=(TrajectorySpec(TrajectoryId("t"), GroupId("g"), prompt_tokens=7),),
    known_tokens=(50,),
    finished=(FinishedWork(10, 4, 0.5),),
    max_context_tokens=4096,
)


def plan(*tp_degrees: int) -> TpDegreePlan:
    return TpDegreePlan(tp_degrees, "known", 12.5, 0.0, ((4, 20.0), (2, 14.0), (1, None)))


def test_a_batch_has_a_plan_searched_and_the_plan_is_deployed() -> None:
    stage = Stage()
    assert stage.feed(ev.DegreesRequested, NODE) == [PlanDegrees(1)]
    assert (stage.state.degree_request, stage.state.tp_degree_plan) == (NODE, None)
    assert stage.feed(ev.DegreesPlanned, 1, plan(2, 2)) == [DeployEngines(1, (2, 2))]
    assert (stage.state.degree_request, stage.state.tp_degree_plan) == (None, plan(2, 2))


def test_what_the_user_asks_for_is_deployed_without_a_search_the_largest_first() -> None:
    stage = Stage()
    asked = replace(NODE, asked=(1, 3), candidates=())
    assert stage.feed(ev.DegreesRequested, asked) == [DeployEngines(1, (3, 1))]
    assert stage.state.tp_degree_plan == TpDegreePlan((3, 1), "asked")


def test_a_stale_plan_changes_nothing() -> None:
    stage = Stage()
    stage.late(ev.DegreesPlanned, 1, plan(4))
    stage.feed(ev.DegreesRequested, NODE)
    stage.feed(ev.DegreesRequested, replace(NODE, request_id=2))
    stage.late(ev.DegreesPlanned, 1, plan(4))
    assert stage.state.tp_degree_plan is None
    assert stage.feed(ev.DegreesPlanned, 2, plan(2, 1, 1)) == [DeployEngines(2, (2, 1, 1))]
    stage.late(ev.DegreesPlanned, 2, plan(4))
    assert stage.state.tp_degree_plan == plan(2, 1, 1)


def test_without_a_plan_the_engines_stay_as_they_are() -> None:
    stage = Stage()
    stage.feed(ev.DegreesRequested, NODE)
    stage.feed(ev.DegreesPlanned, 1, plan(2, 2))
    stage.feed(ev.DegreesRequested, replace(NODE, request_id=2, running=(2, 2)))
    assert stage.feed(ev.DegreesPlanned, 2, None, "no node has 8 GPUs") == []
    assert stage.state.degree_request is None
    assert stage.state.tp_degree_plan == plan(2, 2)
    stage.late(ev.DegreesPlanned, 2, plan(4))


@pytest.mark.parametrize(
    ("tp_degrees", "message"),
    [
        ((), "leaves no engine"),
        ((3, 1), "TP degrees 3,1 were planned; allowed are 1, 2, 4"),
        ((4, 1), "need 5 GPUs and 2 workers; there are 4 and 4"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(tp_degrees: tuple[int, ...], message: str) -> None:
    stage = Stage()
    stage.feed(ev.DegreesRequested, NODE)
    with pytest.raises(GuardViolation, match=message):
        stage.feed(ev.DegreesPlanned, 1, plan(*tp_degrees))
    assert stage.state.tp_degree_plan is None


def test_more_engines_than_workers_are_refused() -> None:
    stage = Stage()
    stage.feed(ev.DegreesRequested, replace(NODE, nodes=(NodeGpus(4, 1),)))
    with pytest.raises(GuardViolation, match="need 2 GPUs and 2 workers; there are 4 and 1"):
        stage.feed(ev.DegreesPlanned, 1, plan(1, 1))


def test_what_runs_may_go_on_at_a_tp_degree_that_is_no_candidate() -> None:
    stage = Stage()
    stage.feed(ev.DegreesRequested, replace(NODE, running=(3,)))
    assert stage.feed(ev.DegreesPlanned, 1, plan(3)) == [DeployEngines(1, (3,))]


def test_a_replay_takes_the_plan_from_the_journal_and_deploys_the_same() -> None:
    stage = Stage()
    stage.feed(ev.DegreesRequested, NODE)
    stage.feed(ev.DegreesPlanned, 1, plan(2, 2))
    stage.feed(ev.EngineJoined, engine_of("E1"))
    stage.feed(ev.DegreesRequested, replace(NODE, request_id=2, asked=(4,)))
    stage.feed(ev.EngineLost, EngineId("E1"), "its worker changes TP degree", False)
    stage.feed(ev.DegreesRequested, replace(NODE, request_id=3))
    stage.feed(ev.DegreesPlanned, 3, None, "no node")
    lines = json.loads(json.dumps(stage.journal))
    fresh = Controller(build_strategies("sticky-least-loaded"))
    assert list(replay(fresh, lines)) == []
    assert fresh.state.tp_degree_plan == stage.state.tp_degree_plan == TpDegreePlan((4,), "asked")
    lines[1][1][0][2] = [4]
    (mismatch,) = replay(Controller(build_strategies("sticky-least-loaded")), lines)
    assert (mismatch.line, mismatch.replayed) == (2, [["DeployEngines", 1, [2, 2]]])
