"""Lists of events in, lists of commands out: actions and the hosts that run them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds.core_builders import Stage, action_of

from heddle_dask.core import events as ev
from heddle_dask.core.commands import AbortAction, GiveUpAction, RunAction
from heddle_dask.core.ids import ActionId, HostId, TrajectoryId
from heddle_dask.core.resources import Resources
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.core.transitions import TrajectoryState

H1, H2 = HostId("H1"), HostId("H2")


def stage_with(cpus: int = 4, *trajectories: str) -> Stage:
    stage = Stage()
    stage.add_host("H1", cpus)
    stage.submit(*(trajectories or ("a", "b")))
    return stage


def run(name: str, host: str = "H1", cpus: int = 1) -> RunAction:
    return RunAction(ActionId(name), HostId(host), Resources.of(cpus=cpus))


def test_an_action_runs_with_the_fewest_cpus_it_accepts() -> None:
    stage = stage_with(4)
    assert stage.act("a1", "a", cpus=(2, 4)) == [replace(run("a1", cpus=2), reach_cpus=4, nice=19)]
    assert stage.state.hosts[H1].free_cpus == 2
    assert stage.trajectory("a").state is TrajectoryState.ACTING
    assert stage.acted(run("a1", cpus=2)) == []
    assert stage.state.hosts[H1].free_cpus == 4
    assert stage.trajectory("a").state is TrajectoryState.THINKING
    assert not stage.state.actions


def test_actions_go_to_the_emptiest_host_and_the_first_of_equals() -> None:
    stage = stage_with(2)
    stage.add_host("H2", 3)
    assert stage.act("a1", "a") == [run("a1", "H2")]
    assert stage.act("a2", "a") == [run("a2", "H1")]
    assert stage.act("a3", "a") == [run("a3", "H2")]


def test_actions_start_in_order_of_arrival() -> None:
    stage = stage_with(1)
    stage.act("a1", "a")
    for name in ("b1", "a2", "b2"):
        assert stage.act(name, name[0]) == []
    assert stage.acted(run("a1")) == [run("b1")]
    assert stage.acted(run("b1")) == [run("a2")]
    assert stage.acted(run("a2")) == [run("b2")]


def test_a_wide_action_at_the_head_is_not_overtaken() -> None:
    stage = stage_with(2)
    stage.act("a1", "a")
    assert stage.act("a2", "a", cpus=(2, 2)) == []
    assert stage.act("b1", "b") == [], "one CPU is free, but a2 came first"
    assert stage.acted(run("a1")) == [run("a2", cpus=2)]
    assert stage.acted(run("a2", cpus=2)) == [run("b1")]


def test_a_wide_action_holds_back_only_its_own_pool() -> None:
    stage = stage_with(1)
    stage.act("a1", "a", pool="gpu")
    assert stage.act("b1", "b") == [run("b1")], "no host of pool gpu is there"
    assert stage.add_host("G1", 2, pool="gpu") == [run("a1", "G1")]
    assert stage.act("a2", "a", cpus=(2, 2), pool="gpu") == []
    stage.acted(run("b1"))
    assert stage.act("b2", "b") == [run("b2")]


def test_an_action_that_needs_no_cpu_runs_on_a_full_host() -> None:
    stage = stage_with(1)
    stage.act("a1", "a")
    assert stage.act("a2", "a", cpus=(0, 0)) == [run("a2", cpus=0)]
    assert stage.state.hosts[H1].free_cpus == 0
    stage.acted(run("a2", cpus=0))
    assert stage.act("b1", "b") == []


def test_actions_wait_for_the_first_host() -> None:
    stage = Stage()
    stage.submit("a")
    assert stage.act("a1", "a") == []
    assert stage.act("a2", "a") == []
    assert stage.add_host("H1", 4) == [run("a1"), run("a2")]


def test_an_action_wider_than_every_host_is_given_up() -> None:
    stage = stage_with(2)
    cause = "it needs 4 CPUs; the largest worker of pool cpu has 2 CPUs"
    assert stage.act("a1", "a", cpus=(4, 8)) == [GiveUpAction(ActionId("a1"), cause)]
    assert stage.trajectory("a").state is TrajectoryState.THINKING
    assert not stage.state.actions


def test_an_action_that_waited_for_a_host_and_is_wider_blocks_nobody() -> None:
    stage = Stage()
    stage.submit("a", "b")
    stage.act("a1", "a", cpus=(4, 8))
    stage.act("b1", "b")
    cause = "it needs 4 CPUs; the largest worker of pool cpu has 2 CPUs"
    assert stage.add_host("H1", 2) == [GiveUpAction(ActionId("a1"), cause), run("b1")]
    assert stage.trajectory("a").state is TrajectoryState.THINKING


def test_an_action_id_is_used_once() -> None:
    stage = stage_with()
    stage.act("a1", "a")
    with pytest.raises(KeyError, match="action a1 was requested before"):
        stage.act("a1", "a")


def test_an_action_beside_a_step_leaves_the_step_alone() -> None:
    stage = stage_with()
    stage.join("E1")
    start = stage.placed("a")
    stage.act("a1", "a")
    assert stage.trajectory("a").state is TrajectoryState.QUEUED
    stage.start(start)
    stage.acted(run("a1"))
    assert stage.trajectory("a").state is TrajectoryState.GENERATING
    stage.act("a2", "a")
    stage.finish(start)
    stage.acted(run("a2"))
    assert stage.trajectory("a").state is TrajectoryState.THINKING


def test_a_trajectory_acts_until_its_last_action_ends() -> None:
    stage = stage_with()
    stage.act("a1", "a")
    stage.act("a2", "a")
    stage.acted(run("a2"))
    assert stage.trajectory("a").state is TrajectoryState.ACTING
    stage.acted(run("a1"))
    assert stage.trajectory("a").state is TrajectoryState.THINKING


def test_messages_about_no_action_or_another_host_are_late() -> None:
    stage = stage_with()
    stage.add_host("H2", 1)
    (command,) = stage.act("a1", "a")
    assert command == run("a1")
    stage.late(ev.ActionFinished, ActionId("a1"), H2, 0.1)
    stage.late(ev.ActionFinished, ActionId("zz"), H1, 0.1)
    stage.acted(run("a1"))
    stage.late(ev.ActionFinished, ActionId("a1"), H1, 0.1)
    stage.end("a")
    stage.late(ev.ActionRequested, action_of("a2", "a"))
    stage.late(ev.ActionRequested, action_of("z1", "z"))


# -- hosts lost ------------------------------------------------------------------------------------------


def test_actions_of_a_lost_host_run_again_elsewhere_before_later_ones() -> None:
    stage = stage_with(1, "a", "b", "c")
    stage.act("a1", "a")
    stage.act("b1", "b")
    assert stage.feed(ev.HostLost, H1) == []
    stage.act("c1", "c")
    stage.late(ev.ActionFinished, ActionId("a1"), H1, 0.1)
    assert stage.add_host("H2", 2) == [run("a1", "H2"), run("b1", "H2")]
    assert stage.acted(run("a1", "H2")) == [run("c1", "H2")]


def test_an_action_that_kills_its_hosts_is_given_up() -> None:
    stage = Stage()
    stage.submit("a")
    stage.act("a1", "a")
    for number in range(4):  # three losses are forgiven where nobody says otherwise
        assert stage.add_host(f"H{number}") == [run("a1", f"H{number}")]
        commands = stage.feed(ev.HostLost, HostId(f"H{number}"))
    assert commands == [GiveUpAction(ActionId("a1"), "its worker died 4 times while it ran")]
    assert stage.trajectory("a").state is TrajectoryState.THINKING
    assert stage.add_host("H9") == []


def test_a_wide_action_waits_for_its_host_to_come_back() -> None:
    stage = stage_with(4)
    stage.add_host("H2", 1)
    stage.act("a1", "a", cpus=(4, 4))
    assert stage.feed(ev.HostLost, H1) == [], "it died with its worker: it is tried again"
    assert stage.add_host("H3", 4) == [run("a1", "H3", 4)]


# -- the program waits no longer, or the trajectory ends ---------------------------------------------------


def test_a_running_action_that_is_cancelled_is_aborted_and_a_waiting_one_is_dropped() -> None:
    stage = stage_with(2)
    stage.act("a1", "a", cpus=(2, 2))
    stage.act("b1", "b", cpus=(2, 2))
    stage.act("b2", "b")
    assert stage.feed(ev.ActionCancelled, ActionId("a1")) == [AbortAction(ActionId("a1"), H1)]
    stage.late(ev.ActionCancelled, ActionId("a1"))
    assert stage.state.hosts[H1].free_cpus == 0, "its worker ends it first"
    assert stage.feed(ev.ActionCancelled, ActionId("b1")) == []
    assert stage.trajectory("b").state is TrajectoryState.ACTING
    assert stage.acted(run("a1", cpus=2)) == [run("b2")]
    assert stage.trajectory("a").state is TrajectoryState.THINKING
    stage.act("b3", "b", cpus=(2, 2))
    assert stage.feed(ev.ActionCancelled, ActionId("b3")) == []
    stage.feed(ev.ActionCancelled, ActionId("b2"))
    assert stage.feed(ev.HostLost, H1) == [] and not stage.state.actions
    assert stage.trajectory("b").state is TrajectoryState.THINKING


def test_running_actions_of_an_ended_trajectory_are_aborted_and_free_their_cpus_when_they_report() -> None:
    stage = stage_with(2)
    stage.act("a1", "a", cpus=(2, 2))
    stage.act("b1", "b")
    assert stage.end("a") == [AbortAction(ActionId("a1"), H1)]
    assert stage.state.hosts[H1].free_cpus == 0
    assert TrajectoryId("a") in stage.state.trajectories
    assert stage.acted(run("a1", cpus=2)) == [run("b1")]
    assert TrajectoryId("a") not in stage.state.trajectories
    stage.late(ev.ActionFinished, ActionId("a1"), H1, 0.1)


def test_waiting_actions_of_an_ended_trajectory_are_dropped_and_let_others_pass() -> None:
    stage = stage_with(2, "a", "b", "c")
    stage.act("b1", "b")
    assert stage.act("a1", "a", cpus=(2, 2)) == []
    assert stage.act("a2", "a") == []
    assert stage.act("c1", "c") == [], "behind a1"
    assert stage.end("a") == [run("c1")]
    assert TrajectoryId("a") not in stage.state.trajectories


def test_a_host_that_dies_with_actions_of_an_ended_trajectory_leaves_nothing() -> None:
    stage = Stage(retries=RetryPolicy(max_losses=0))
    stage.submit("a")
    stage.add_host("H1")
    stage.act("a1", "a")
    stage.act("a2", "a")
    stage.end("a")
    assert stage.feed(ev.HostLost, H1) == [], "no trajectory waits, so no command"
    assert not stage.state.actions
    assert not stage.state.trajectories
    assert stage.add_host("H2") == []


def test_an_action_that_never_ran_says_nothing_of_how_long_such_a_tool_takes() -> None:
    stage = Stage()
    stage.add_host("H1")
    stage.submit("a")
    (first,) = stage.act("x", "a")
    assert isinstance(first, RunAction)
    stage.feed(ev.ActionFinished, first.action_id, first.host_id, 0.0, False, False)
    record = stage.trajectory("a")
    assert (record.actions_done, record.tools_s, record.actions_open) == ([], 0.0, 0)
    assert stage.state.hosts[first.host_id].free_cpus == 4
