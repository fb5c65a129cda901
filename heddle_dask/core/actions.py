"""Actions: waiting for resources, running on hosts, recovery after the loss of a host or the end of a trajectory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from heddle_dask.core import events as ev
from heddle_dask.core import guards
from heddle_dask.core.api_calls import ApiCalls
from heddle_dask.core.commands import AbortAction, Command, GiveUpAction, ReleaseHost, RunAction, WakeUp
from heddle_dask.core.entities import NO_RESOURCES, Action, Host, Trajectory
from heddle_dask.core.ids import HostId
from heddle_dask.core.optional_parts import offers
from heddle_dask.core.quotas import NOTHING_SAID, REPEATED, calls_of
from heddle_dask.core.resources import GPUS, Resources, use_text
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.core.sandboxes import Sandboxes
from heddle_dask.core.service_copies import ServiceCopy
from heddle_dask.core.services import ServicePool
from heddle_dask.core.state import State
from heddle_dask.core.transitions import ActionEvent, ActionState, CopyEvent, TrajectoryEvent, TrajectoryState
from heddle_dask.core.view import (
    ActionAllocation,
    ClusterView,
    EndedAction,
    ForgetsTrajectories,
    GathersEvents,
    Grant,
    ObservesActions,
)
from heddle_dask.core.waiting_actions import ActionTurns, PoolCapacity, on_chunks


class Actions:
    """The controller's handler of actions and their hosts.

    Parameters
    ----------
    retries
        How often an action is repeated whose host was lost, and how long one waits for a worker, or for an API that is
        shut.
    """

    def __init__(self, state: State, view: ClusterView, allocation: ActionAllocation, retries: RetryPolicy) -> None:
        self.state = state
        self.view = view
        self.allocation = allocation
        self.max_losses = retries.max_losses
        self.turns = ActionTurns(state)
        self.capacity = PoolCapacity(state, retries.max_pool_wait_s)
        self.services = ServicePool(state, retries.max_losses)
        self.calls = ApiCalls(state, retries.max_call_s)
        self.sandboxes = Sandboxes(state)
        self._allocates_at_s: float | None = None  # of the `WakeUp` that ends the gathering of events

    def pools_declared(self, event: ev.PoolsDeclared) -> list[Command]:
        for quota in event.quotas:
            self.state.apis.declare(quota)
        for service in event.services:
            self.state.services[service.name] = service
        self.capacity.declare(event.pool_maxima)
        return [*self._give_up_hopeless(list(self.view.waiting_actions), event.at), *self.allocate()]

    def time_reached(self, event: ev.TimeReached) -> list[Command]:
        """A time for which a `WakeUp` asked: actions that waited for it may start, or have waited long enough."""
        commands: list[Command] = []
        for action_id in self.state.delayed_actions.take_due(event.at):
            action = self.state.actions[action_id]
            self.sandboxes.queue([action])
            commands += self.capacity.requested(action, event.at)
        for action, cause in self.capacity.overdue(event.at):
            commands += self._give_up_action(action, event.at, cause)
        for name, cause in dict(self.state.apis.impatient(event.at, self.calls.max_wait_s)).items():
            if name in self.state.actions:  # it may have been given up for want of a worker
                commands += self._give_up_action(self.state.actions[name], event.at, cause)
        commands += self.capacity.time_reached(event.at)
        gathered = self._allocates_at_s is not None and event.at >= self._allocates_at_s
        if gathered:
            self._allocates_at_s = None
        return [*commands, *self.allocate(gathered)]

    def requested(self, event: ev.ActionRequested) -> list[Command]:
        spec = event.action
        if spec.action_id in self.state.actions:
            raise KeyError(f"action {spec.action_id} was requested before")
        trajectory = self.state.trajectories.get(spec.trajectory_id)
        if trajectory is None or not trajectory.advance(TrajectoryEvent.ACTION_REQUESTED, event.at):
            return self.state.count_stale()
        trajectory.open_labels.append(spec.label)
        spec, refusal = on_chunks(spec, self.state.services)
        action = Action(spec=spec, number=self.state.next_number(), requested_at=event.at)
        self.state.actions[spec.action_id] = action
        self.sandboxes.entered(action, trajectory)
        if spec.attempt:
            action.delayed_s = self.calls.backoff_s(spec)
            self.state.delayed_actions.add(spec.action_id, event.at + action.delayed_s, action.number)
        else:
            self.sandboxes.queue([action])
        refusal = refusal or self._over_quota(action) or self.capacity.hopeless(action)
        if refusal:
            return [*self._give_up_action(action, event.at, refusal), *self.allocate()]
        bounded = [] if spec.attempt else self.capacity.requested(action, event.at)
        return [*bounded, *self.allocate()]

    def _over_quota(self, action: Action) -> str:
        """Why an action makes more calls at once than the quota of its API ever allows; empty if it does not."""
        for name, calls in calls_of(action.least):
            most = self.state.apis.of(name).quota.most_at_once
            if most is not None and most < calls:
                return f"it needs {use_text(name, calls)} at once; its quota allows {use_text(name, most)}"
        return ""

    def _give_up_hopeless(self, waiting: Iterable[Action], at: float) -> list[Command]:
        """Give up actions that no worker of their pool, seen or declared, could run even when empty."""
        causes = [(action, self.capacity.hopeless(action)) for action in waiting]
        given_up = (self._give_up_action(action, at, cause) for action, cause in causes if cause)
        return [command for commands in given_up for command in commands]

    def allocate_by(self, allocation: ActionAllocation) -> None:
        """From now on this strategy decides; all that waits, and all hosts, are new to it."""
        if allocation != self.allocation:
            self.allocation = allocation
            self.state.new_actions = dict.fromkeys(self.state.waiting_actions)
            self.state.freed_hosts = dict.fromkeys(self.state.hosts)

    def allocate(self, gathered: bool = False) -> list[Command]:
        """Start the actions that the strategy grants, now or together with other events of this moment.

        Places on busy copies of model services are given at once; copies that wait for memory go on. Where time alone
        lets more start, a `WakeUp` asks for it.

        Parameters
        ----------
        gathered
            Whether the other events of this moment have been waited for.
        """
        self.sandboxes.place_waiting()
        commands: list[Command] = []
        for action, copy in self.services.joining():
            commands += self._place(action, copy)
        commands += self._allocate_now() if gathered else self._allocate_soon()
        return [*commands, *self.services.make_room(), *self.calls.wake_ups()]

    def _allocate_soon(self) -> list[Command]:
        if not self.state.waiting_actions or not self.state.hosts or self._allocates_at_s is not None:
            return []
        if offers(self.allocation, GathersEvents):
            delay_s = self.allocation.pass_delay_s(self.view)
            if delay_s is not None:
                self._allocates_at_s = self.state.at + delay_s
                return [WakeUp(self._allocates_at_s)]
        return self._allocate_now()

    def _allocate_now(self) -> list[Command]:
        if not self.state.waiting_actions or not self.state.hosts:
            return []
        self.turns.allocating()
        commands: list[Command] = []
        grants = list(self.allocation.allocate(self.view))
        for number, grant in enumerate(grants):
            guards.check_grant(self.state, grant)
            action = self.state.actions[grant.action_id]
            if grant.resources[GPUS]:
                commands += self._place_granted(action, grant, grants[number + 1 :])
                continue
            action.advance(ActionEvent.STARTED)
            action.started_at = self.state.at
            waits = self.calls.waits(action)
            self._occupy(action, grant.host_id, grant.resources)
            lent = {"reach_cpus": grant.reach_cpus, "nice": grant.nice}
            commands.append(RunAction(grant.action_id, grant.host_id, grant.resources, waits, **lent))
        self.state.new_actions.clear()
        self.state.freed_hosts.clear()
        return commands

    def _occupy(self, action: Action, host_id: HostId, resources: Resources) -> None:
        host = self.state.hosts[host_id]
        action.host, action.resources, action.granted_at = host_id, resources, self.state.at
        host.take(resources)
        host.running[action.spec.action_id] = None
        self.turns.started(action)
        self.state.stop_waiting(action)
        self.state.apis.take(action.spec.action_id, resources, self.state.at)

    def _place_granted(self, action: Action, grant: Grant, others: Sequence[Grant]) -> list[Command]:
        """Give a granted action its GPUs: a place on a copy that an earlier grant has opened, otherwise a chunk."""
        host, gpus = self.state.hosts[grant.host_id], grant.resources[GPUS]
        later = [other.resources[GPUS] for other in others if other.host_id == grant.host_id]
        only_gpus = action.spec.demand.names == (GPUS,)
        copy = self.services.joinable(action, None if only_gpus else grant.host_id, idle=False)
        copy = copy or self.services.chosen(action, host, gpus, [each for each in later if each])
        return [] if copy is None else self._place(action, copy, grant.resources)

    def _place(self, action: Action, copy: ServiceCopy, granted: Resources | None = None) -> list[Command]:
        """Give an action a place on a copy, with the GPUs of that copy beside the other resources."""
        rest = action.least if granted is None else granted
        resources = Resources.of({**dict(rest), GPUS: copy.chunk.gpus})
        action.waits = self.calls.waits(action)
        self._occupy(action, copy.host_id, resources)
        return self.services.enter(action, copy)

    def finished(self, event: ev.ActionFinished) -> list[Command]:
        action = self.state.actions.get(event.action_id)
        if action is None or action.host != event.host_id or action.state is ActionState.LOADING:
            return self.state.count_stale()
        ended = EndedAction(action.spec, action.resources, event.run_s, event.ok, event.cause)
        reports = self.calls.judge(action, event)
        self._release(action, event.ran, {"tokens": event.used_tokens, "cost": event.used_cost})
        action.advance(ActionEvent.FINISHED)
        if event.ran and offers(self.allocation, ObservesActions):
            self.allocation.action_ended(ended)
        owner = self.state.trajectories[action.spec.trajectory_id]
        if event.ran:
            owner.take_action(action.spec.label, event.run_s, event.ok, event.at)
            if event.cause not in REPEATED:
                self.state.tool_seconds.took(action.spec.label, event.run_s)
        self._close_action(action, event.at)
        commands = [*reports, *self.sandboxes.close_idle(), *self.allocate()]
        return [*commands, *self._release_if_empty(self.state.hosts[event.host_id])]

    def cancelled(self, event: ev.ActionCancelled) -> list[Command]:
        """A program no longer waits for its action."""
        action = self.state.actions.get(event.action_id)
        if action is None or action.unawaited:
            return self.state.count_stale()
        commands = self._cancel(action)
        if action.host is None:
            self._close_action(action, event.at)
        return [*commands, *self.sandboxes.close_idle(), *self.allocate()]

    def sandbox_closed(self, event: ev.SandboxClosed) -> list[Command]:
        """A program needs its sandbox no longer."""
        return [*self.sandboxes.closed(event), *self.allocate()]

    def _release(self, action: Action, ran: bool = True, used: Mapping[str, float | None] = NOTHING_SAID) -> None:
        assert action.host is not None, action.spec.action_id
        host = self.state.hosts[action.host]
        self.turns.ended(action)
        self.services.leave(action)
        host.give_back(action.resources)
        self.state.apis.give_back(action.spec.action_id, action.resources, self.state.at, ran, used)
        del host.running[action.spec.action_id]
        self.state.freed_hosts[action.host] = None
        action.host, action.resources = None, NO_RESOURCES

    def _close_action(self, action: Action, at: float) -> None:
        """Delete the record of the action and update its trajectory."""
        trajectory = self.state.trajectories[action.spec.trajectory_id]
        self._forget_action(action)
        if trajectory.actions_open == 0 and trajectory.state is not TrajectoryState.ENDED:
            trajectory.advance(TrajectoryEvent.LAST_ACTION_ENDED, at)

    def _forget_action(self, action: Action) -> None:
        self.state.stop_waiting(action)
        self.state.unplaced_actions.pop(action.spec.action_id, None)
        self.sandboxes.forgotten(action)
        del self.state.actions[action.spec.action_id]
        trajectory = self.state.trajectories[action.spec.trajectory_id]
        trajectory.open_labels.remove(action.spec.label)
        self.state.forget_if_over(trajectory)

    def _give_up_action(self, action: Action, at: float, cause: str) -> list[Command]:
        action.advance(ActionEvent.CANCELLED)
        self._close_action(action, at)
        return [GiveUpAction(action.spec.action_id, cause)]

    def host_joined(self, event: ev.HostJoined) -> list[Command]:
        spec = event.host
        if spec.host_id in self.state.hosts:
            raise KeyError(f"host {spec.host_id} joined before; a restart needs a new id")
        host = Host(spec=spec, number=self.state.next_number())
        self.state.hosts[spec.host_id] = host
        self.state.freed_hosts[spec.host_id] = None
        first_of_pool = spec.pool not in self.state.pool_maxima
        self.capacity.host_joined(host)
        # Only what was requested before the largest worker of its pool was known has not been judged.
        unjudged = [a for a in self.view.waiting_actions if a.spec.pool == spec.pool] if first_of_pool else ()
        return [*self._give_up_hopeless(unjudged, event.at), *self.allocate()]

    def host_draining(self, event: ev.HostDraining) -> list[Command]:
        """A host takes no more actions; its running ones may finish."""
        host = self.state.hosts.get(event.host_id)
        if host is None or host.draining:
            return self.state.count_stale()
        host.draining = True
        self.sandboxes.host_left(host)
        # What only this host could run holds back nothing from here on.
        commands = self.capacity.host_left(host.spec.pool, event.at)
        return [*commands, *self.allocate(), *self._release_if_empty(host)]

    def _release_if_empty(self, host: Host) -> list[Command]:
        if not host.draining or host.running or host.released:
            return []
        host.released = True
        return [ReleaseHost(host.spec.host_id)]

    def host_lost(self, event: ev.HostLost) -> list[Command]:
        host = self.state.hosts.get(event.host_id)
        if host is None:
            return self.state.count_stale()
        commands: list[Command] = []
        stranded = [self.state.actions[action_id] for action_id in host.running]
        for action in stranded:
            self._release(action)
            action.losses += action.state is ActionState.RUNNING
            action.advance(ActionEvent.HOST_LOST)
        host.draining = True  # it takes none of them again
        self.sandboxes.host_left(host)
        # The lost actions had started earlier than the waiting ones, so they go first.
        self.sandboxes.queue(sorted(stranded, key=lambda action: action.number), first=True)
        self.services.host_lost(host)
        self.state.freed_hosts.pop(event.host_id, None)
        del self.state.hosts[event.host_id]
        for action in stranded:
            if action.unawaited:
                action.advance(ActionEvent.CANCELLED)
                self._close_action(action, event.at)
            elif action.losses > self.max_losses:
                cause = f"its worker died {action.losses} times while it ran"
                commands += self._give_up_action(action, event.at, cause)
        commands += self.capacity.host_left(host.spec.pool, event.at)
        return [*commands, *self.sandboxes.close_idle(), *self.allocate()]

    def service_loaded(self, event: ev.ServiceLoaded) -> list[Command]:
        """A host reports the end of a load of a model service."""
        change = CopyEvent.LOADED if event.ok else CopyEvent.LOAD_FAILED
        copy = self.services.reported(event, change)
        if copy is None:
            return self.state.count_stale()
        if event.ok:
            return [*self.services.loaded(copy, event.seconds), *self.allocate()]
        commands, back = self.services.load_failed(copy)
        for action in back:
            self._release(action)
            action.advance(ActionEvent.LOAD_FAILED)
        self.state.wait_first(back)
        cause = self.services.failed_too_often(copy.service, event.cause)
        hopeless = list(self.state.service_queues.get(copy.service, ())) if cause else []
        for name in hopeless:
            commands += self._give_up_action(self.state.actions[name], event.at, cause)
        return [*commands, *self.allocate(), *self._release_if_empty(self.state.hosts[event.host_id])]

    def service_evicted(self, event: ev.ServiceEvicted) -> list[Command]:
        """A host reports that memory of its GPUs is free."""
        copy = self.services.reported(event, CopyEvent.EVICTED)
        if copy is None:
            return self.state.count_stale()
        self.state.remove_copy(copy)
        return self.allocate()

    def service_lost(self, event: ev.ServiceLost) -> list[Command]:
        """A host reports that a copy of a model service has died; its running requests report by themselves."""
        copy = self.services.reported(event, CopyEvent.LOST)
        if copy is None:
            return self.state.count_stale()
        return [*self.services.lost(copy), *self.allocate()]

    def cancel_all(self, trajectory: Trajectory) -> list[Command]:
        """The program or the reward of a trajectory has ended: drop, abort and close all that it has left."""
        if offers(self.allocation, ForgetsTrajectories):
            self.allocation.forget(trajectory)
        self.sandboxes.trajectory_ended(trajectory)
        if trajectory.actions_open == 0:
            return self.sandboxes.close_idle()
        name = trajectory.trajectory_id
        mine = [a for a in self.state.actions.values() if a.spec.trajectory_id == name and not a.unawaited]
        commands: list[Command] = []
        for action in mine:
            commands += self._cancel(action)
            if action.host is None:
                self._forget_action(action)
        return [*commands, *self.sandboxes.close_idle()]

    def _cancel(self, action: Action) -> list[Command]:
        """Abort what nobody waits for; its host reports the end of one that runs, any other has no host afterwards."""
        action.advance(ActionEvent.CANCELLED)
        action.unawaited = True
        if action.host is None:
            return []
        if action.state is ActionState.RUNNING:
            return [AbortAction(action.spec.action_id, action.host)]
        host = self.state.hosts[action.host]  # its service is being loaded: its host does not know it
        self._release(action)
        return self._release_if_empty(host)
