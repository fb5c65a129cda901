"""Sandboxes of trajectories: on which host each is, and the memory that is reserved for it.

The controller places a sandbox when its first action is requested (ARL-Tangram, section 5.2): of the hosts with enough
memory for the sandbox's whole life, those with the CPUs for this action come first, and of these the one with the
largest share of free memory. Later actions stay there (`Action.host_fixed`). A strategy therefore sees only actions
whose sandbox has a host, and need not know of the reserved memory: it is off `Host.free`.

A host that drains or is lost gives up its sandboxes. The next action of such a sandbox chooses a host anew; the worker
there lacks the sandbox, and the driver sends what has to be replayed.
"""

from __future__ import annotations

from collections.abc import Iterable

from heddle_dask.core import events as ev
from heddle_dask.core.commands import CloseSandbox, Command
from heddle_dask.core.entities import Action, Host, SandboxPlace, Trajectory
from heddle_dask.core.ids import ActionId
from heddle_dask.core.resources import MEMORY
from heddle_dask.core.state import State


class Sandboxes:
    """The controller's handler of sandboxes."""

    def __init__(self, state: State) -> None:
        self.state = state

    def entered(self, action: Action, trajectory: Trajectory) -> None:
        """Note a new action, and its sandbox if that is new; `queue` follows."""
        name = action.spec.sandbox
        if name and name not in self.state.sandboxes:
            place = SandboxPlace(
                name, trajectory.trajectory_id, self.state.next_number(), action.spec.sandbox_memory_bytes
            )
            self.state.sandboxes[name] = place
            trajectory.sandboxes.append(name)
        if name:
            self.state.sandboxes[name].open_actions += 1

    def forgotten(self, action: Action) -> None:
        """An action has ended in whatever way."""
        if action.spec.sandbox:
            self.state.sandboxes[action.spec.sandbox].open_actions -= 1

    def queue(self, actions: Iterable[Action], *, first: bool = False) -> None:
        """Queue actions that do not run; `first`: before those that wait already."""
        waiting: list[Action] = []
        unplaced: dict[ActionId, None] = {}
        for action in actions:
            self._fix(action)
            if action.spec.sandbox and action.host_fixed is None:
                unplaced[action.spec.action_id] = None
            else:
                waiting.append(action)
        if first:
            self.state.wait_first(waiting)
            self.state.unplaced_actions = {**unplaced, **self.state.unplaced_actions}
            return
        for action in waiting:
            self.state.wait(action)
        self.state.unplaced_actions.update(unplaced)

    def _fix(self, action: Action) -> None:
        """Set the host of the action to that of its sandbox, which is placed now if it has none."""
        if not action.spec.sandbox:
            return
        place = self.state.sandboxes[action.spec.sandbox]
        blocked = any(
            self.state.actions[i].spec.pool == action.spec.pool and i != action.spec.action_id
            for i in self.state.unplaced_actions
        )
        if place.host is None and not blocked:
            self._place(place, action)
        action.host_fixed = place.host

    def place_waiting(self) -> None:
        """Place the sandboxes that wait for memory, oldest first in each pool."""
        full: set[str] = set()
        for action_id in list(self.state.unplaced_actions):
            action = self.state.actions[action_id]
            place = self.state.sandboxes[action.spec.sandbox]
            if place.host is None and action.spec.pool not in full:
                self._place(place, action)
            if place.host is None:
                full.add(action.spec.pool)
                continue
            action.host_fixed = place.host
            del self.state.unplaced_actions[action_id]
            self.state.stranded.pop(action_id, None)
            self.state.wait(action)

    def _place(self, place: SandboxPlace, action: Action) -> None:
        candidates = [
            host
            for host in self.state.hosts.values()
            if not host.draining and host.spec.pool == action.spec.pool and _has_memory(host, place)
        ]
        if not candidates:
            return
        parent = self.state.sandboxes.get(action.spec.sandbox_parent)
        near = [host for host in candidates if parent is not None and host.spec.host_id == parent.host]
        least = action.least
        # `max` takes the first of equals: the host that joined first.
        host = max(
            near or candidates,
            key=lambda host: (host.fits(least), _free_share(host, place), -len(host.sandboxes)),
        )
        place.host = host.spec.host_id
        place.reserved_bytes = place.memory_bytes if host.spec.resources[MEMORY] else 0
        if place.reserved_bytes:
            host.free[MEMORY] -= place.reserved_bytes
        host.sandboxes[place.name] = None

    def host_left(self, host: Host) -> None:
        """The host drains or is lost: its sandboxes are rebuilt elsewhere, and their waiting actions queue anew."""
        for name in list(host.sandboxes):
            self._leave_host(self.state.sandboxes[name])
        moved = [
            action
            for action in (self.state.actions[i] for i in self.state.waiting_actions)
            if action.host_fixed == host.spec.host_id
        ]
        for action in moved:
            self.state.stop_waiting(action)
            action.host_fixed = None
        self.queue(moved, first=True)

    def _leave_host(self, place: SandboxPlace) -> None:
        if place.host is None:
            return
        host = self.state.hosts[place.host]
        del host.sandboxes[place.name]
        if place.reserved_bytes:
            host.free[MEMORY] += place.reserved_bytes
        place.host, place.reserved_bytes = None, 0

    def closed(self, event: ev.SandboxClosed) -> list[Command]:
        """A program has closed its sandbox; an action of it that has not ended, such as an aborted one, may end."""
        place = self.state.sandboxes.get(event.sandbox)
        if place is None or place.closing:
            return self.state.count_stale()
        self.state.trajectories[place.trajectory_id].sandboxes.remove(place.name)
        place.closing = True
        self.state.closing_sandboxes[place.name] = None
        return self.close_idle()

    def trajectory_ended(self, trajectory: Trajectory) -> None:
        """Mark the sandboxes of an ended trajectory for `close_idle`."""
        for name in trajectory.sandboxes:
            self.state.sandboxes[name].closing = True
            self.state.closing_sandboxes[name] = None
        trajectory.sandboxes.clear()

    def close_idle(self) -> list[Command]:
        """Close the sandboxes that are to be closed and have no action any more."""
        commands: list[Command] = []
        for name in list(self.state.closing_sandboxes):
            place = self.state.sandboxes[name]
            if place.open_actions:
                continue
            if place.host is not None:
                commands.append(CloseSandbox(place.host, name))
            self._leave_host(place)
            del self.state.sandboxes[name], self.state.closing_sandboxes[name]
        return commands


def _has_memory(host: Host, place: SandboxPlace) -> bool:
    """Whether the host has the memory free; one that announces no memory takes every sandbox."""
    return not host.spec.resources[MEMORY] or host.free.get(MEMORY, 0) >= place.memory_bytes


def _free_share(host: Host, place: SandboxPlace) -> float:
    """The share of the host's memory that is free once the sandbox is there."""
    memory_bytes = host.spec.resources[MEMORY]
    return (host.free.get(MEMORY, 0) - place.memory_bytes) / memory_bytes if memory_bytes else 1.0
