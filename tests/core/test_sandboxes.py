"""Sandboxes in the controller: chosen by memory, fixed to their host, given up by it, closed; accounts balance."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from worlds.core_builders import Stage, action_of, trajectory_spec

from heddle_dask.core import events as ev
from heddle_dask.core.commands import AbortAction, CloseSandbox, Command, GiveUpAction, RunAction, WakeUp
from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import GuardViolation
from heddle_dask.core.ids import HostId
from heddle_dask.core.journal_codec import replay
from heddle_dask.core.nouns import ActionRequest, HostDescription
from heddle_dask.core.resources import CPUS, MEMORY, Resources
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.core.view import ClusterView, Grant
from heddle_dask.strategies.presets import build_strategies

GIB = 1 << 30


def host(name: str, cpus: int = 4, memory_gib: int = 8) -> HostDescription:
    return HostDescription(HostId(name), Resources.of(cpus=cpus, memory_bytes=memory_gib * GIB))


def call(name: str, trajectory: str, box: str, *, gib: int = 1, cpus: int = 1, parent: str = "") -> ActionRequest:
    request = action_of(name, trajectory, cpus=(cpus, cpus))
    return replace(request, sandbox=box, sandbox_memory_bytes=gib * GIB, sandbox_parent=parent)


def stage_with(*hosts: HostDescription, trajectories: int = 4, retries: RetryPolicy | None = None) -> Stage:
    stage = Stage(retries=retries)
    for each in hosts:
        stage.feed(ev.HostJoined, each)
    for number in range(trajectories):
        stage.feed(ev.TrajectorySubmitted, trajectory_spec(f"t{number}"))
    return stage


def act(stage: Stage, request: ActionRequest) -> list[Command]:
    return stage.feed(ev.ActionRequested, request)


def where(commands: Sequence[Command]) -> list[tuple[str, str]]:
    return [(c.action_id, c.host_id) for c in commands if isinstance(c, RunAction)]


def memory_free(stage: Stage, name: str) -> int:
    return stage.state.hosts[HostId(name)].free[MEMORY] // GIB


def test_the_first_action_goes_where_most_memory_is_free_and_later_ones_stay() -> None:
    stage = stage_with(host("h0", memory_gib=8), host("h1", memory_gib=4))
    placed = [where(act(stage, call(f"a{i}", f"t{i}", f"b{i}", gib=2)))[0][1] for i in range(3)]
    # Shares of free memory afterwards: 6/8 or 2/4; then 4/8 or 2/4, and h1 has no sandbox yet; then 4/8 or 0/4.
    assert placed == ["h0", "h1", "h0"]
    assert (memory_free(stage, "h0"), memory_free(stage, "h1")) == (4, 2)
    stage.feed(ev.ActionFinished, "a0", "h0", 1.0)
    assert memory_free(stage, "h0") == 4, "the memory stays reserved"
    assert stage.state.hosts[HostId("h0")].free_cpus == 3, "it holds no cores while it waits"
    assert where(act(stage, call("a4", "t0", "b0", gib=2))) == [("a4", "h0")]
    assert memory_free(stage, "h0") == 4


def test_a_host_with_cores_for_the_action_is_preferred() -> None:
    stage = stage_with(host("h0", cpus=2), host("h1", cpus=2, memory_gib=4))
    act(stage, action_of("wide", "t0", cpus=(2, 2)))
    assert where(act(stage, call("a", "t1", "b"))) == [("a", "h1")]


def test_an_action_waits_for_the_cores_of_its_host_and_others_pass_it() -> None:
    stage = stage_with(host("h0", cpus=2), host("h1", cpus=2))
    act(stage, call("a", "t0", "b"))
    stage.feed(ev.ActionFinished, "a", "h0", 1.0)
    act(stage, call("wide", "t1", "c", cpus=2))  # on h0 or h1
    other = where(act(stage, action_of("wider", "t2", cpus=(2, 2))))
    assert other and where(act(stage, call("a2", "t0", "b"))) == []
    assert stage.state.actions["a2"].host_fixed == "h0"


def test_sandboxes_wait_for_memory_in_order() -> None:
    stage = stage_with(host("h0", memory_gib=4))
    act(stage, call("a", "t0", "b0", gib=3))
    assert where(act(stage, call("big", "t1", "b1", gib=2))) == []
    assert where(act(stage, call("small", "t2", "b2", gib=1))) == [], "it does not pass the one before"
    assert stage.controller.snapshot().actions_waiting == 2
    stage.feed(ev.ActionFinished, "a", "h0", 1.0)
    commands = stage.feed(ev.SandboxClosed, "b0")
    assert commands[0] == CloseSandbox(HostId("h0"), "b0")
    assert where(commands) == [("big", "h0"), ("small", "h0")]


def test_a_sandbox_that_no_host_can_hold_is_given_up_in_one_line() -> None:
    stage = stage_with(host("h0", memory_gib=4))
    (command,) = act(stage, call("a", "t0", "b0", gib=5))
    assert isinstance(command, GiveUpAction) and "it needs 5.0 GiB of memory; the largest worker" in command.cause
    stage.feed(ev.TrajectoryEnded, "t0", "failed")
    assert stage.state.sandboxes == {}


def test_trajectories_that_wait_for_the_memory_of_one_another_do_not_do_so_for_ever() -> None:
    stage = stage_with(host("h0", memory_gib=4), retries=RetryPolicy(max_pool_wait_s=100))
    for name in ("t0", "t1"):
        act(stage, call(f"{name} first", name, f"{name} a", gib=2))
        stage.feed(ev.ActionFinished, f"{name} first", "h0", 1.0)
    (wake_up,) = act(stage, call("t0 second", "t0", "t0 b", gib=2))
    assert wake_up == WakeUp(stage.at + 100.0)
    act(stage, call("t1 second", "t1", "t1 b", gib=2))
    stage.at = wake_up.at_s - 1.0
    given_up, *_ = stage.feed(ev.TimeReached)
    assert isinstance(given_up, GiveUpAction) and given_up.action_id == "t0 second"
    assert given_up.cause == "no worker of pool cpu had memory for one more sandbox of its trajectory for 100 s"
    commands = stage.feed(ev.TrajectoryEnded, "t0", "failed")
    assert where(commands) == [("t1 second", "h0")] and not stage.state.stranded


def test_hosts_that_announce_no_memory_take_sandboxes_in_turn() -> None:
    stage = stage_with(*(HostDescription(HostId(name), Resources.of(cpus=8)) for name in ("h0", "h1")))
    assert [where(act(stage, call(f"a{i}", f"t{i}", f"b{i}", gib=99)))[0][1] for i in range(4)] == [
        "h0",
        "h1",
        "h0",
        "h1",
    ]


def test_a_copy_is_made_where_its_parent_is() -> None:
    stage = stage_with(host("h0", memory_gib=8), host("h1", memory_gib=8))
    act(stage, call("a", "t0", "b0"))
    assert where(act(stage, call("c", "t0", "copy", parent="b0"))) == [("c", "h0")]
    assert where(act(stage, call("d", "t0", "large", gib=7, parent="b0"))) == [("d", "h1")]


@pytest.mark.parametrize("how", [ev.HostDraining, ev.HostLost])
def test_a_host_that_leaves_gives_up_its_sandboxes(how: type) -> None:
    stage = stage_with(host("h0", cpus=1), host("h1", memory_gib=4))
    act(stage, call("a", "t0", "b0"))
    assert where(act(stage, call("b", "t0", "b0"))) == [], "it waits for the only core of h0"
    commands = stage.feed(how, "h0")
    again = [("a", "h1")] if how is ev.HostLost else []
    assert where(commands) == [*again, ("b", "h1")]
    assert memory_free(stage, "h1") == 3
    if how is ev.HostDraining:
        stage.feed(ev.ActionFinished, "a", "h0", 1.0)
        stage.feed(ev.HostLost, "h0")
    closed = stage.feed(ev.TrajectoryEnded, "t0", "completed")
    assert CloseSandbox(HostId("h1"), "b0") not in closed, "its action runs"
    for name in [c.action_id for c in closed if isinstance(c, AbortAction)]:
        closed = stage.feed(ev.ActionFinished, name, "h1", 1.0, False)
    assert CloseSandbox(HostId("h1"), "b0") in closed
    assert memory_free(stage, "h1") == 4


def test_the_end_of_a_trajectory_closes_its_sandboxes_once() -> None:
    stage = stage_with(host("h0"))
    act(stage, call("a", "t0", "b0"))
    act(stage, call("c", "t0", "b1"))
    stage.feed(ev.ActionFinished, "a", "h0", 1.0)
    commands = stage.feed(ev.TrajectoryEnded, "t0", "completed")
    assert commands == [AbortAction("c", "h0"), CloseSandbox(HostId("h0"), "b0")]
    assert stage.feed(ev.ActionFinished, "c", "h0", 1.0, False) == [CloseSandbox(HostId("h0"), "b1")]
    assert stage.feed(ev.SandboxClosed, "b1") == []
    assert memory_free(stage, "h0") == 8


class Elsewhere:
    """A strategy that does not respect where a sandbox is."""

    def allocate(self, view: ClusterView) -> list[Grant]:
        (action,) = view.waiting_actions
        other = next(h for h in view.hosts if h.spec.host_id != action.host_fixed)
        return [Grant(action.spec.action_id, other.spec.host_id, action.spec.demand.least)]


def test_a_grant_on_another_host_is_refused() -> None:
    strategies = replace(build_strategies("sticky-least-loaded", seed=0), actions=Elsewhere())
    stage = Stage(strategies=strategies)
    for name in ("h0", "h1"):
        stage.feed(ev.HostJoined, host(name))
    stage.feed(ev.TrajectorySubmitted, trajectory_spec("t0"))
    with pytest.raises(GuardViolation, match="needs its sandbox on h0"):
        act(stage, call("a", "t0", "b0"))


@pytest.mark.parametrize("seed", range(12))
def test_accounts_balance_over_random_histories(seed: int) -> None:
    """`Stage` checks the state after each event; at the end everything is free, and the journal replays."""
    rng = random.Random(seed)
    stage = Stage()
    hosts: dict[str, HostDescription] = {}
    alive: dict[str, list[str]] = {}
    running: dict[str, str] = {}
    closed: set[str] = set()
    numbers = iter(range(10_000))

    def feed(kind: type, *fields: Any) -> None:
        for command in stage.feed(kind, *fields):
            match command:
                case RunAction():
                    action = stage.state.actions[command.action_id]
                    assert action.host_fixed in (None, command.host_id)
                    running[command.action_id] = command.host_id
                case CloseSandbox():
                    assert (command.host_id, command.sandbox) not in closed
                    assert command.sandbox not in stage.state.sandboxes
                    closed.add(command.sandbox)

    for _ in range(250):
        match rng.choice(["host", "leave", "begin", "act", "act", "act", "act", "finish", "finish", "close", "end"]):
            case "host" if len(hosts) < 4:
                made = host(f"h{next(numbers)}", rng.choice((1, 2, 8)), rng.choice((2, 8)))
                hosts[made.host_id] = made
                feed(ev.HostJoined, made)
            case "leave" if hosts:
                name = rng.choice(list(hosts))
                if rng.random() < 0.5:
                    feed(ev.HostDraining, name)
                else:
                    del hosts[name]
                    for action in [a for a, at in running.items() if at == name]:
                        del running[action]
                    feed(ev.HostLost, name)
            case "begin" if len(alive) < 6:
                name = f"t{next(numbers)}"
                alive[name] = []
                feed(ev.TrajectorySubmitted, trajectory_spec(name))
            case "act" if alive:
                name = rng.choice(list(alive))
                boxes = alive[name]
                if not boxes or rng.random() < 0.3:
                    boxes.append(f"box{next(numbers)}")
                box = rng.choice([*boxes, ""])
                request = call(
                    f"a{next(numbers)}",
                    name,
                    box,
                    gib=rng.choice((0, 1, 2)),
                    cpus=rng.choice((0, 1, 1, 2)),
                    parent=rng.choice(boxes) if rng.random() < 0.3 else "",
                )
                if not box:
                    request = replace(request, sandbox_memory_bytes=0, sandbox_parent="")
                feed(ev.ActionRequested, request)
            case "finish" if running:
                action = rng.choice(list(running))
                feed(ev.ActionFinished, action, running.pop(action), 1.0, rng.random() < 0.8)
            case "close" if alive:
                boxes = alive[rng.choice(list(alive))]
                if boxes:
                    feed(ev.SandboxClosed, boxes.pop(rng.randrange(len(boxes))))
            case "end" if alive:
                name = rng.choice(list(alive))
                del alive[name]
                feed(ev.TrajectoryEnded, name, "completed")
    for name in list(alive):
        feed(ev.TrajectoryEnded, name, "completed")
    while running:
        action = next(iter(running))
        feed(ev.ActionFinished, action, running.pop(action), 1.0)
    state = stage.state
    assert not state.actions and not state.sandboxes and not state.closing_sandboxes and not state.unplaced_actions
    for each in state.hosts.values():
        assert dict(each.free) == dict(each.spec.resources)
    assert closed, "sandboxes were closed"
    lines = json.loads(json.dumps(stage.journal))
    fresh = Controller(build_strategies("sticky-least-loaded", seed=0), stage.controller.retries)
    assert list(replay(fresh, lines)) == []
    assert CPUS in dict(host("x").resources)
