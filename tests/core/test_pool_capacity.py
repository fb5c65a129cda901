"""Demands that no worker can meet: judged by the largest worker seen or declared; waits without one are bounded."""

from __future__ import annotations

from dataclasses import replace

from worlds.core_builders import Stage, action_of

from heddle_dask.core import events as ev
from heddle_dask.core.commands import Command, GiveUpAction, RunAction, WakeUp
from heddle_dask.core.ids import ActionId, HostId
from heddle_dask.core.nouns import HostDescription
from heddle_dask.core.resources import PoolMaximum, ResourceDemand, Resources
from heddle_dask.core.run_description import RetryPolicy


def stage_of(max_pool_wait_s: int = 60) -> Stage:
    stage = Stage(retries=RetryPolicy(max_pool_wait_s=max_pool_wait_s))
    stage.submit("a", "b")
    return stage


def gives_up(commands: list[Command]) -> dict[str, str]:
    return {c.action_id: c.cause for c in commands if isinstance(c, GiveUpAction)}


def test_a_demand_is_judged_by_the_declared_maximum_before_any_worker_has_joined() -> None:
    stage = stage_of()
    stage.feed(ev.PoolsDeclared, (), (), (PoolMaximum("cpu", Resources.of(cpus=8)),))
    assert gives_up(stage.act("a1", "a", cpus=(9, 9))) == {
        "a1": "it needs 9 CPUs; the largest worker of pool cpu has 8 CPUs"
    }
    assert not gives_up(stage.act("a2", "a", cpus=(8, 8)))


def test_what_waits_is_judged_when_the_maximum_is_declared() -> None:
    stage = stage_of()
    stage.act("a1", "a", cpus=(9, 9))
    commands = stage.feed(ev.PoolsDeclared, (), (), (PoolMaximum("cpu", Resources.of(cpus=8)),))
    assert set(gives_up(commands)) == {"a1"}


def test_a_declared_maximum_lets_a_wide_action_wait_for_a_larger_worker() -> None:
    stage = stage_of()
    stage.feed(ev.PoolsDeclared, (), (), (PoolMaximum("cpu", Resources.of(cpus=8)),))
    stage.add_host("H1", 2)
    assert stage.act("a1", "a", cpus=(8, 8)) == [WakeUp(stage.at + 60)]
    assert stage.add_host("H2", 8)[-1] == RunAction(ActionId("a1"), HostId("H2"), Resources.of(cpus=8))


def test_an_unknown_pool_is_named_where_pools_are_declared() -> None:
    stage = stage_of()
    stage.feed(ev.PoolsDeclared, (), (), (PoolMaximum("cpu", Resources.of(cpus=8)),))
    cause = "no worker of pool judge has joined or is declared; pools: cpu"
    assert gives_up(stage.act("a1", "a", pool="judge")) == {"a1": cause}


def test_no_single_worker_has_all_that_is_needed() -> None:
    stage = stage_of()
    for name, amounts in (("H1", {"cpus": 8}), ("H2", {"cpus": 1, "memory_bytes": 2**30})):
        stage.feed(ev.HostJoined, HostDescription(HostId(name), Resources.of(amounts)))
    demand = ResourceDemand.of(cpus=8, memory_bytes=2**30)
    commands = stage.feed(ev.ActionRequested, replace(action_of("a1", "a"), demand=demand))
    cause = "no worker of pool cpu has all of: 8 CPUs, 1.0 GiB of memory"
    assert gives_up(commands) == {"a1": cause}


def test_a_pool_without_a_worker_waits_visibly_and_for_a_bounded_time() -> None:
    stage = stage_of(60)
    began = stage.at + 1
    assert stage.act("a1", "a") == [WakeUp(began + 60)]
    assert stage.act("b1", "b") == [], "one time is asked for"
    assert stage.controller.snapshot().counts()["actions_without_worker"] == 2
    stage.at = began + 59
    cause = "no worker of pool cpu that can run it was there for 60 s"
    commands = stage.feed(ev.TimeReached)
    assert gives_up(commands) == {"a1": cause}
    assert commands[-1] == WakeUp(began + 61), "for b1"
    assert gives_up(stage.feed(ev.TimeReached)) == {"b1": cause}
    assert not stage.state.stranded and not stage.state.actions


def test_a_worker_that_joins_ends_the_count_and_its_loss_begins_it_anew() -> None:
    stage = stage_of(60)
    stage.act("a1", "a")
    assert stage.add_host("H1")[-1] == RunAction(ActionId("a1"), HostId("H1"), Resources.of(cpus=1))
    assert not stage.state.stranded
    stage.feed(ev.HostLost, HostId("H1"))
    assert stage.state.stranded == {ActionId("a1"): stage.at + 60}


def test_a_draining_worker_counts_as_none() -> None:
    stage = stage_of(60)
    stage.add_host("H1", 1)
    stage.act("a1", "a")
    stage.act("b1", "b")
    stage.feed(ev.HostDraining, HostId("H1"))
    assert set(stage.state.stranded) == {ActionId("b1")}


def test_without_a_bound_an_action_waits_for_ever() -> None:
    stage = stage_of(0)
    assert stage.act("a1", "a") == []
    stage.at += 1e9
    assert stage.feed(ev.TimeReached) == []
