"""A tool worker that goes is a failure if it takes actions with it; sessions begin with workers that come again."""

from __future__ import annotations

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.ids import ActionId, GroupId, HostId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest, HostDescription, TrajectorySpec
from heddle_dask.core.resources import Resources
from heddle_dask.views.history.run_history import RunHistory

A = TrajectoryId("a")
HOST = HostId("tools")


def test_a_host_that_leaves_with_nothing_on_it_is_no_failure() -> None:
    history = RunHistory()
    history.take(ev.HostJoined(0.0, HostDescription(HOST, Resources.of(cpus=4))), [])
    history.take(ev.HostLost(0.1, HOST), [])
    history.take(ev.HostJoined(0.2, HostDescription(HOST, Resources.of(cpus=4))), [])
    assert history.failures.rows() == ()
    history.take(ev.TrajectorySubmitted(1.0, TrajectorySpec(A, GroupId("g"))), [cmd.AdmitTrajectory(A)])
    action = ActionId(f"{A}:0")
    history.take(
        ev.ActionRequested(2.0, ActionRequest(action, A, "tool", "run")),
        [cmd.RunAction(action, HOST, Resources.of(cpus=1))],
    )
    history.take(ev.HostLost(3.0, HOST), [])
    (failure,) = history.failures.rows()
    assert (failure.boundary, failure.count) == ("host", 1)
