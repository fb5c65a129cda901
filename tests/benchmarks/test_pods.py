"""One pod per trajectory: its control plane, its node, its limits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from worlds.action_worlds import ActionRun, command, planned, suite

from benchmarks.opponents.pod_settings import PodSettings
from benchmarks.opponents.pods import SimulatedPods
from heddle_dask.core import events as ev
from heddle_dask.core.errors import BadInput


def pods_run(plans: list[Any], **settings_: Any) -> ActionRun:
    nodes = settings_.pop("nodes", (4,))
    return ActionRun(plans, unmanaged=partial(SimulatedPods, PodSettings(nodes, **settings_)))


def test_the_control_plane_starts_pods_one_after_the_other() -> None:
    plans = [planned(name, command(1.0)) for name in "abc"]
    run = pods_run(plans, starts_per_s=2.0, start_s=3.0, exec_s=0.25)
    asked = run.calls[0].asked_s
    waits = sorted(call.begun_s - asked for call in run.calls)
    assert waits == pytest.approx([3.75, 4.25, 4.75])


def test_the_control_plane_sends_commands_one_after_the_other() -> None:
    plans = [planned(name, command(1.0)) for name in "abc"]
    run = pods_run(plans, execs_per_s=2.0)
    asked = run.calls[0].asked_s
    assert sorted(call.begun_s - asked for call in run.calls) == pytest.approx([0.5, 1.0, 1.5])


def test_a_pod_uses_its_limit_at_most() -> None:
    run = pods_run([planned("a", rewards=[suite(8.0)])], limit_cpus=2.0)
    assert run.calls[0].run_s == pytest.approx(4.0)


def test_a_pod_without_room_waits_for_another_trajectory_to_end() -> None:
    plans = [planned(name, command(2.0)) for name in "ab"]
    run = pods_run(plans, request_cpus=4.0)
    first, second = sorted(run.world.programs.values(), key=lambda program: program.finished_s)
    assert second.finished_s > first.finished_s and run.calls[1].begun_s >= first.finished_s


def test_pods_of_a_node_share_its_cpus() -> None:
    plans = [planned(name, command(2.0)) for name in "ab"]
    run = pods_run(plans, nodes=(1,))
    assert [call.run_s for call in run.calls] == pytest.approx([4.0, 4.0])


def test_a_command_in_a_pod_has_a_time_limit() -> None:
    run = pods_run([planned("a", command(9.0, timeout_s=2.0))])
    (event,) = run.events(ev.ActionFinished)
    assert (event.cause, event.run_s) == ("timeout", pytest.approx(2.0))


def test_pods_that_start_too_slowly_are_made_again_and_then_fail() -> None:
    plans = [planned(f"t{n}", command(1.0)) for n in range(4)]
    slow = pods_run(plans, starts_per_s=1.0, start_timeout_s=2.5)
    assert set(slow.statuses) == {"completed"}  # the third and fourth pod are made a second time
    never = pods_run(plans[:1], start_s=5.0, start_timeout_s=2.0, start_tries=2)
    assert never.calls[0].cause == "start"


def test_impossible_pods_are_refused() -> None:
    with pytest.raises(BadInput, match="room for the request"):
        PodSettings((2,), request_cpus=4.0)
