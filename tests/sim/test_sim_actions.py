"""Calls of simulated programs: units, hosts that come and go, time limits, rewards."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.action_worlds import ActionRun, command, planned, suite

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.ids import ActionId, HostId, TrajectoryId
from heddle_dask.core.journal_codec import encode
from heddle_dask.core.nouns import ActionRequest
from heddle_dask.core.resources import ResourceDemand, Resources
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.sim.fleet import SimulatedFaults, equal_hosts
from heddle_dask.sim.loop import VirtualTime
from heddle_dask.sim.program import SimulatedCall
from heddle_dask.sim.tools import SimulatedTools
from heddle_dask.strategies.presets import build_strategies, tell_costs


def check_no_call_is_lost(run: ActionRun) -> None:
    """Each action of a completed rollout ended once, began when its host had room, and came back in order."""
    ends = Counter(event.action_id for event in run.events(ev.ActionFinished))
    assert ends == Counter(call.action_id for call in run.calls)
    for call in run.calls:
        assert call.asked_s <= call.begun_s <= call.back_s, call.action_id
    # What runs at a time on a host, from the commands alone.
    taken: Counter[str] = Counter()
    where: dict[str, tuple[str, int]] = {}
    sizes = {host.host_id: host.cpus for host in run.fleet.action_hosts}
    for event, commands in run.lines:
        if isinstance(event, ev.ActionFinished) and event.action_id in where:
            host, cpus = where.pop(event.action_id)
            taken[host] -= cpus
        if isinstance(event, ev.HostLost):
            for action_id, (host, cpus) in list(where.items()):
                if host == event.host_id:
                    del where[action_id]
                    taken[host] -= cpus
        for one in commands:
            if isinstance(one, cmd.RunAction):
                where[one.action_id] = (one.host_id, one.cpus)
                taken[one.host_id] += one.cpus
                assert taken[one.host_id] <= sizes[one.host_id], one
    assert not where


def test_a_call_takes_what_its_profile_says() -> None:
    run = ActionRun([planned("a", command(2.0), rewards=[suite(8.0)])], delay_s=0.25)
    first, reward = run.calls
    assert first.begun_s == pytest.approx(first.asked_s + 0.25)
    assert first.run_s == 2.0 and first.back_s == pytest.approx(first.asked_s + 2.5)
    assert reward.run_s == pytest.approx(8.0)  # one unit
    assert reward.back_s == pytest.approx(run.world.programs["a"].finished_s)
    check_no_call_is_lost(run)


def test_a_sandbox_keeps_its_host_and_its_memory() -> None:
    held = replace(command(1.0), sandbox_bytes=6)
    plans = [planned(name, held, held) for name in "abc"]
    run = ActionRun(plans, host_list=equal_hosts(2, 4, memory_bytes=10))
    places = {one.action_id: one.host_id for one in run.commands(cmd.RunAction)}
    assert all(places[f"{name}:1"] == places[f"{name}:2"] for name in "abc")
    # Two sandboxes fit at a time; the third waits for the end of a trajectory.
    third = max(run.calls, key=lambda call: call.begun_s)
    first_end_s = min(program.finished_s for program in run.world.programs.values())
    mine = [call for call in run.calls if call.trajectory_id == third.trajectory_id]
    assert mine[0].begun_s >= first_end_s
    check_no_call_is_lost(run)


def test_actions_queue_for_cpus() -> None:
    plans = [planned(name, command(3.0)) for name in "abc"]
    run = ActionRun(plans, hosts=1, cpus=1)
    begun = sorted(call.begun_s for call in run.calls)
    assert begun[1] == pytest.approx(begun[0] + 3.0) and begun[2] == pytest.approx(begun[0] + 6.0)
    check_no_call_is_lost(run)


def test_a_time_limit_ends_a_call() -> None:
    run = ActionRun([planned("a", command(9.0, timeout_s=2.0))])
    (event,) = run.events(ev.ActionFinished)
    assert (event.ok, event.cause, event.run_s) == (False, "timeout", 2.0)
    assert run.statuses == ["completed"]


def test_the_first_action_waits_for_its_sandbox() -> None:
    run = ActionRun([planned("a", command(1.0), command(1.0))], hosts=1, sandbox_start_s=4.0)
    assert [call.run_s for call in run.calls] == [5.0, 1.0]


def test_a_lost_host_takes_its_actions_along_and_they_run_elsewhere() -> None:
    plans = [planned(name, command(5.0), command(1.0)) for name in "abcd"]
    run = ActionRun(plans, hosts=2, cpus=2, faults=SimulatedFaults(hosts_lost={0: 2.0}))
    assert run.statuses == ["completed"] * 4
    assert len(run.events(ev.HostLost)) == 1 and len(run.commands(cmd.RunAction)) > len(run.calls)
    check_no_call_is_lost(run)


def test_a_drained_host_finishes_what_it_runs() -> None:
    plans = [planned(name, command(5.0), command(1.0)) for name in "abcd"]
    run = ActionRun(plans, hosts=2, cpus=2, faults=SimulatedFaults(hosts_drain={0: 2.0}))
    assert run.statuses == ["completed"] * 4
    assert len(run.commands(cmd.ReleaseHost)) == 1 and len(run.events(ev.HostLost)) == 1
    assert len(run.commands(cmd.RunAction)) == len(run.calls)  # nothing ran twice
    check_no_call_is_lost(run)


def test_a_host_that_joins_takes_what_waits() -> None:
    free = replace(command(5.0), in_sandbox=False)  # a sandbox would stay on its host
    plans = [planned(name, free) for name in "ab"]
    run = ActionRun(plans, hosts=2, cpus=1, faults=SimulatedFaults(hosts_join={1: 3.0}))
    assert max(call.begun_s for call in run.calls) == pytest.approx(3.0)
    check_no_call_is_lost(run)


def test_a_tool_that_is_given_up_fails_its_program_and_a_reward_stays_unknown() -> None:
    # Each host dies while the action runs, one more often than is allowed.
    faults = SimulatedFaults(hosts_join={1: 3.0, 2: 6.0}, hosts_lost={0: 2.0, 1: 5.0})
    retries = RetryPolicy(max_losses=1)
    failed = ActionRun([planned("a", command(50.0))], hosts=3, faults=faults, retries=retries)
    assert failed.statuses == ["failed"] and len(failed.commands(cmd.GiveUpAction)) == 1
    unknown = ActionRun([planned("a", rewards=[suite(50.0)])], hosts=3, faults=faults, retries=retries)
    assert unknown.statuses == ["completed"] and unknown.calls[0].cause


def test_an_action_that_no_host_can_run_is_given_up() -> None:
    wide = replace(command(1.0), demand=ResourceDemand.of(cpus=64))
    run = ActionRun([planned("a", wide)], hosts=1, cpus=4)
    assert run.statuses == ["failed"] and "largest worker" in run.calls[0].cause


def test_an_aborted_action_reports_what_it_ran() -> None:
    time = VirtualTime()
    ends: list[ev.ActionFinished] = []
    tools = SimulatedTools(time, lambda _: False, lambda event, _: ends.append(event))
    request = ActionRequest(ActionId("a:1"), TrajectoryId("a"), "tool", "command")
    call = SimulatedCall(request, command(100.0), 0.0)
    tools.run(cmd.RunAction(request.action_id, HostId("h"), Resources.of(cpus=1)), call)
    time.at(3.0, tools.abort, request.action_id)
    time.at(3.0, tools.abort, request.action_id)  # a second time is too late
    time.run()
    (event,) = ends
    assert (event.at, event.run_s, event.ok, event.cause) == (3.0, 3.0, False, "aborted")


def test_trajectories_may_be_submitted_later() -> None:
    run = ActionRun([planned("a", command(1.0)), replace(planned("b", command(1.0)), submitted_s=7.0)])
    assert run.world.programs["b"].started_s == 7.0 and run.statuses == ["completed"] * 2


_ACTIONS = st.lists(st.sampled_from([0.001, 0.5, 2.0, 7.0]), min_size=1, max_size=4)


@given(
    st.lists(_ACTIONS, min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 3),
    st.dictionaries(st.integers(0, 2), st.sampled_from([0.3, 1.0, 4.0]), max_size=2),
    st.dictionaries(st.integers(0, 2), st.sampled_from([0.6, 2.0, 5.0]), max_size=1),
)
@settings(max_examples=40, deadline=None)
def test_no_call_is_lost_whatever_happens_to_hosts(
    seconds: list[list[float]], hosts: int, cpus: int, lost: dict[int, float], drained: dict[int, float]
) -> None:
    plans = [
        planned(f"t{number}", *(command(s) for s in each), rewards=[suite(sum(each))])
        for number, each in enumerate(seconds)
    ]
    # The last host stays, so that everything can end.
    faults = SimulatedFaults(hosts_lost=lost, hosts_drain=drained)
    run = ActionRun(plans, host_list=equal_hosts(hosts + 3, cpus), faults=faults)
    assert set(run.statuses) == {"completed"}
    check_no_call_is_lost(run)


def test_the_same_events_give_the_same_commands() -> None:
    plans = [planned(f"t{n}", command(1.0 + n), command(0.5), rewards=[suite(4.0 * n + 1)]) for n in range(6)]
    run = ActionRun(plans, faults=SimulatedFaults(hosts_lost={0: 3.0}, tool_failure_share=0.3), check=False)
    strategies = build_strategies("sticky-least-loaded", overrides=run.overrides)
    tell_costs(strategies, run.fleet.beliefs)
    again = Controller(strategies, run.retries)
    for event, commands in run.lines:
        assert [encode(one) for one in again.handle(event)] == [encode(one) for one in commands]
