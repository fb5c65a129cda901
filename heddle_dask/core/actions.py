"""Actions: waiting for CPUs, running on hosts, and recovery after the loss of a host or the end of a trajectory."""

from __future__ import annotations

from collections.abc import Iterable

from heddle_dask.core import events as ev
from heddle_dask.core import guards
from heddle_dask.core.commands import AbortAction, Command, GiveUpAction, ReleaseHost, RunAction
from heddle_dask.core.entities import Action, Host, Trajectory
from heddle_dask.core.state import State
from heddle_dask.core.transitions import ActionEvent, TrajectoryEvent, TrajectoryState
from heddle_dask.core.view import ActionAllocation, ClusterView


class Actions:
    """The controller's handler of actions and their hosts.

    Parameters
    ----------
    max_losses
        Losses of one action with its host that are retried; at the next loss it is given up.
    """

    def __init__(
        self, state: State, view: ClusterView, allocation: ActionAllocation, max_losses: int
    ) -> None:
        self.state = state
        self.view = view
        self.allocation = allocation
        self.max_losses = max_losses

    def requested(self, event: ev.ActionRequested) -> list[Command]:
        """A trajectory requests an action."""
        spec = event.action
        if spec.action_id in self.state.actions:
            raise KeyError(f"action {spec.action_id} was requested before")
        trajectory = self.state.trajectories.get(spec.trajectory_id)
        if trajectory is None or not trajectory.advance(TrajectoryEvent.ACTION_REQUESTED, event.at):
            return self.state.count_stale()
        trajectory.open_labels.append(spec.label)
        action = Action(spec=spec, number=self.state.next_number())
        self.state.actions[spec.action_id] = action
        self.state.waiting_actions[spec.action_id] = None
        return [*self._give_up_too_wide([action], event.at), *self.allocate()]

    def _give_up_too_wide(self, waiting: Iterable[Action], at: float) -> list[Command]:
        """Give up actions that no host of their pool could run even when empty."""
        largest: dict[str, int] = {}
        for host in self.state.hosts.values():
            largest[host.spec.pool] = max(host.spec.cpus, largest.get(host.spec.pool, 0))
        commands: list[Command] = []
        for action in waiting:
            need, most = action.spec.min_cpus, largest.get(action.spec.pool)
            if most is not None and most < need:
                cause = f"it needs {need} CPUs; the largest tool worker has {most}"
                commands += self._give_up_action(action, at, cause)
        return commands

    def allocate(self) -> list[Command]:
        """Start the actions that the strategy grants now."""
        if not self.state.waiting_actions or not self.state.hosts:
            return []
        commands: list[Command] = []
        for grant in self.allocation.allocate(self.view):
            guards.check_grant(self.state, grant)
            action, host = self.state.actions[grant.action_id], self.state.hosts[grant.host_id]
            action.advance(ActionEvent.STARTED)
            action.host, action.cpus = grant.host_id, grant.cpus
            host.free_cpus -= grant.cpus
            host.running[grant.action_id] = None
            del self.state.waiting_actions[grant.action_id]
            commands.append(RunAction(grant.action_id, grant.host_id, grant.cpus))
        return commands

    def finished(self, event: ev.ActionFinished) -> list[Command]:
        """A host reports the end of an action."""
        action = self.state.actions.get(event.action_id)
        if action is None or action.host != event.host_id:
            return self.state.count_stale()
        self._release(action)
        action.advance(ActionEvent.FINISHED)
        owner = self.state.trajectories[action.spec.trajectory_id]
        if event.ran:
            owner.take_action(action.spec.label, event.run_s, event.ok, event.at)
            self.state.tool_seconds.took(action.spec.label, event.run_s)
        self._close_action(action, event.at)
        return [*self.allocate(), *self._release_if_empty(self.state.hosts[event.host_id])]

    def _release(self, action: Action) -> None:
        assert action.host is not None, action.spec.action_id
        host = self.state.hosts[action.host]
        host.free_cpus += action.cpus
        del host.running[action.spec.action_id]
        action.host, action.cpus = None, 0

    def _close_action(self, action: Action, at: float) -> None:
        """Delete the record of the action and update its trajectory."""
        trajectory = self.state.trajectories[action.spec.trajectory_id]
        self._forget_action(action)
        if trajectory.actions_open == 0 and trajectory.state is not TrajectoryState.ENDED:
            trajectory.advance(TrajectoryEvent.LAST_ACTION_ENDED, at)

    def _forget_action(self, action: Action) -> None:
        self.state.waiting_actions.pop(action.spec.action_id, None)
        del self.state.actions[action.spec.action_id]
        trajectory = self.state.trajectories[action.spec.trajectory_id]
        trajectory.open_labels.remove(action.spec.label)
        self.state.forget_if_over(trajectory)

    def _give_up_action(self, action: Action, at: float, cause: str) -> list[Command]:
        action.advance(ActionEvent.CANCELLED)
        self._close_action(action, at)
        return [GiveUpAction(action.spec.action_id, cause)]

    def host_joined(self, event: ev.HostJoined) -> list[Command]:
        """A host joins and takes actions."""
        spec = event.host
        if spec.host_id in self.state.hosts:
            raise KeyError(f"host {spec.host_id} joined before; a restart needs a new id")
        number = self.state.next_number()
        self.state.hosts[spec.host_id] = Host(spec=spec, number=number, free_cpus=spec.cpus)
        # Actions requested before any host joined are checked now. After the loss of a host, actions too wide for the
        # other hosts wait until a host joins; only if that one is too small as well are they given up.
        return [*self._give_up_too_wide(list(self.view.waiting_actions), event.at), *self.allocate()]

    def host_draining(self, event: ev.HostDraining) -> list[Command]:
        """A host takes no more actions; its running ones may finish."""
        host = self.state.hosts.get(event.host_id)
        if host is None or host.draining:
            return self.state.count_stale()
        host.draining = True
        return self._release_if_empty(host)

    def _release_if_empty(self, host: Host) -> list[Command]:
        if not host.draining or host.running or host.released:
            return []
        host.released = True
        return [ReleaseHost(host.spec.host_id)]

    def host_lost(self, event: ev.HostLost) -> list[Command]:
        """A host is lost with all its running actions."""
        host = self.state.hosts.get(event.host_id)
        if host is None:
            return self.state.count_stale()
        commands: list[Command] = []
        stranded = [self.state.actions[action_id] for action_id in host.running]
        for action in stranded:
            self._release(action)
            action.advance(ActionEvent.HOST_LOST)
            action.losses += 1
        # The lost actions had started earlier than the waiting ones, so they go first.
        first = dict.fromkeys(a.spec.action_id for a in sorted(stranded, key=lambda a: a.number))
        self.state.waiting_actions = {**first, **self.state.waiting_actions}
        del self.state.hosts[event.host_id]
        for action in stranded:
            if self.state.trajectories[action.spec.trajectory_id].state is TrajectoryState.ENDED:
                action.advance(ActionEvent.CANCELLED)
                self._forget_action(action)
            elif action.losses > self.max_losses:
                cause = f"its worker died {action.losses} times while it ran"
                commands += self._give_up_action(action, event.at, cause)
        return [*commands, *self.allocate()]

    def cancel_all(self, trajectory: Trajectory) -> list[Command]:
        """Drop the waiting actions of an ended trajectory and abort its running ones."""
        if trajectory.actions_open == 0:
            return []
        mine = [a for a in self.state.actions.values() if a.spec.trajectory_id == trajectory.trajectory_id]
        commands: list[Command] = []
        for action in mine:
            action.advance(ActionEvent.CANCELLED)
            if action.host is None:
                self._forget_action(action)
            else:
                commands.append(AbortAction(action.spec.action_id, action.host))
        return commands
