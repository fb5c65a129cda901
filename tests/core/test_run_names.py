"""Names of runs in events, commands and rows of the journal."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.ids import FIRST_RUN, ActionId, EngineId, GroupId, HostId, RunId, StepId, TrajectoryId
from heddle_dask.core.journal_codec import encode
from heddle_dask.core.nouns import ActionRequest, StepRequest, TrajectorySpec
from heddle_dask.core.resources import Resources
from heddle_dask.core.run_names import RunNames, own_row, plain, run_of_item
from heddle_dask.core.run_record import plain_name, qualified

names = st.text(alphabet="ab@12:/", max_size=8)


@given(names, names, st.integers(1, 12), st.integers(1, 12))
def test_names_of_two_runs_are_never_the_same(first: str, other: str, of_first: int, of_other: int) -> None:
    ids = (RunId(str(of_first)), first), (RunId(str(of_other)), other)
    made = [qualified(*each) for each in ids]
    assert [plain_name(name) for name in made] == list(ids)
    assert (made[0] == made[1]) == (ids[0] == ids[1])


def events_of(name: str) -> list[Any]:
    """Events and commands of one trajectory in all shapes that hold names."""
    trajectory, step = TrajectoryId(name), StepId(TrajectoryId(name), 2, 1)
    request = ActionRequest(ActionId(f"{name}:0"), trajectory, "tool", "x", sandbox=f"{name}/box")
    return [
        ev.TrajectorySubmitted(1.0, TrajectorySpec(trajectory, GroupId("g"))),
        ev.TrajectoryForked(1.0, TrajectorySpec(trajectory, GroupId("g")), TrajectoryId(f"{name}-parent")),
        ev.StepRequested(1.0, StepRequest(step, 10, 5)),
        ev.StepFinished(1.0, step, EngineId("e@2"), 3, 0, "stop"),
        ev.ActionRequested(1.0, request),
        cmd.RunAction(ActionId(f"{name}:0"), HostId("h"), Resources.of(cpus=1)),
        cmd.DropContext(trajectory, EngineId("e")),
    ]


@given(names.filter(bool), st.sampled_from(["1", "2", "13"]))
def test_what_is_qualified_is_plain_again(name: str, run: str) -> None:
    run_id = RunId(run)
    runs = RunNames(run_id)
    for item in events_of(name):
        known = runs.qualify(item)
        assert run_of_item(known) == run_id
        if isinstance(item, ev.TrajectorySubmitted):
            assert known.trajectory.run_id == run_id
        row = json.loads(json.dumps(encode(known)))
        own, others = own_row(row, run_id), own_row(row, RunId("99"))
        assert others is None
        assert own is not None and len(own) == len(row)
        back = plain(known)
        expected = json.loads(json.dumps(encode(back)))
        assert own == expected
        if not isinstance(item, ev.TrajectorySubmitted | ev.TrajectoryForked):
            assert back == item


def test_what_is_of_no_run_is_everybodys() -> None:
    lost = ev.EngineLost(1.0, EngineId("e@7"), "it died", True)
    assert run_of_item(lost) is None
    assert RunNames(RunId("2")).qualify(lost) == lost
    assert own_row(encode(lost), RunId("5")) == encode(lost)
    assert RunNames(FIRST_RUN).qualify(lost) is lost
