"""The controller's accounts of hosts: after any history they balance, for every resource."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.core_builders import Stage, trajectory_spec

from heddle_dask.core import events as ev
from heddle_dask.core.commands import GiveUpAction, RunAction
from heddle_dask.core.ids import ActionId, EngineId, HostId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest, EngineDescription, HostDescription
from heddle_dask.core.resources import ResourceDemand, Resources

KINDS = ("ask", "ask", "ask", "end", "end", "join", "lose", "drain", "leave")
EVENTS = st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.integers(0, 3), st.sampled_from([0, 1, 5, 20]))
CAUSES = ("", "raised", "timeout", "memory", "disk", "processes")


class History:
    """Feeds random events, and checks the accounts after each."""

    def __init__(self) -> None:
        self.stage = Stage()
        self.hosts: list[str] = []
        self.granted: dict[str, RunAction] = {}
        self.numbers = 0
        self.feed(ev.EngineJoined, EngineDescription(EngineId("e"), 8, 4096))
        for name in "abc":
            self.feed(ev.TrajectorySubmitted, trajectory_spec(name))
        self.left: list[str] = []

    def feed(self, kind: type, *fields: Any) -> None:
        for command in self.stage.feed(kind, *fields):
            if isinstance(command, RunAction):
                self.granted[command.action_id] = command
            elif isinstance(command, GiveUpAction):
                self.granted.pop(command.action_id, None)
        self.check()

    def check(self) -> None:
        for host_id, host in self.stage.state.hosts.items():
            running = [r.resources for r in self.granted.values() if r.host_id == host_id]
            for name, amount in host.spec.resources:
                used = sum(resources[name] for resources in running)
                assert 0 <= used <= amount and host.free[name] == amount - used, (host_id, name)

    def happen(self, kind: str, which: int, cpus: int, memory: int) -> None:
        self.numbers += 1
        if kind == "ask" and len(self.left) < 3:
            name = next(each for each in "abc" if each not in self.left)
            demand = ResourceDemand.of(cpus=cpus, memory_bytes=memory)
            action = ActionRequest(ActionId(f"x{self.numbers}"), TrajectoryId(name), "tool", "t", demand)
            self.feed(ev.ActionRequested, action)
        elif kind == "end" and self.granted:
            action_id = sorted(self.granted)[which % len(self.granted)]
            host_id, cause = self.granted.pop(action_id).host_id, CAUSES[which % len(CAUSES)]
            self.feed(ev.ActionFinished, action_id, host_id, 1.0, not cause, True, cause)
        elif kind == "join":
            self.hosts.append(f"h{self.numbers}")
            resources = Resources.of(cpus=1 + which, memory_bytes=10)
            self.feed(ev.HostJoined, HostDescription(HostId(self.hosts[-1]), resources))
        elif kind == "lose" and self.hosts:
            lost = self.hosts.pop(which % len(self.hosts))
            self.granted = {name: run for name, run in self.granted.items() if run.host_id != lost}
            self.feed(ev.HostLost, HostId(lost))
        elif kind == "drain" and self.hosts:
            self.feed(ev.HostDraining, HostId(self.hosts[which % len(self.hosts)]))
        elif kind == "leave" and len(self.left) < 3:
            self.left.append(next(each for each in "abc" if each not in self.left))
            self.feed(ev.TrajectoryEnded, TrajectoryId(self.left[-1]), "aborted")


@settings(deadline=None)
@given(history=st.lists(EVENTS, max_size=40))
def test_random_histories_leave_the_accounts_of_hosts_balanced(
    history: list[tuple[str, int, int, int]],
) -> None:
    world = History()
    for event in history:
        world.happen(*event)
    # Aborted actions hold their resources until their host reports their end.
    for action_id in sorted(world.granted):
        run = world.granted.pop(action_id)
        world.feed(ev.ActionFinished, action_id, run.host_id, 1.0, False, True, "aborted")
    while world.granted:
        action_id, run = world.granted.popitem()
        world.feed(ev.ActionFinished, action_id, run.host_id, 1.0)
    for host in world.stage.state.hosts.values():
        assert host.free == dict(host.spec.resources)
