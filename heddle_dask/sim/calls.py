"""Calls of tools and rewards in virtual time: their requests, their hosts, and what carries them out."""

from __future__ import annotations

from collections.abc import Callable

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.ids import ActionId, HostId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest, DurationProfile, HostDescription
from heddle_dask.core.resources import GPUS, ResourceDemand
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.sim.loop import VirtualTime
from heddle_dask.sim.program import ActionBody, Program, SimulatedCall
from heddle_dask.sim.services import ServiceCommand, SimulatedServices
from heddle_dask.sim.tools import SimulatedTools
from heddle_dask.workloads.planned import PlannedAction


class SimulatedCalls:
    """The calls of all programs of a world.

    Parameters
    ----------
    returned
        Called when a call came back to its program, which has not ended.
    given_up
        Called for the program of a tool call that is given up.

    Attributes
    ----------
    all
        Every call by its id, in order of the requests.
    """

    def __init__(
        self,
        fleet: SimulatedFleet,
        time: VirtualTime,
        fails: Callable[[ActionId], bool],
        tell: Callable[[ev.Event], None],
        returned: Callable[[Program, SimulatedCall], None],
        given_up: Callable[[Program], None],
    ) -> None:
        self.all: dict[ActionId, SimulatedCall] = {}
        self._fleet = fleet
        self._time = time
        self._tell = tell
        self._returned = returned
        self._given_up = given_up
        self._programs: dict[TrajectoryId, Program] = {}
        cpus = {host.host_id: host.cpus for host in fleet.action_hosts if host.cpus}
        self._tools = SimulatedTools(time, fails, self._ended, cpus, fleet.sandbox_start_s)
        self._unmanaged = None if fleet.unmanaged is None else fleet.unmanaged(time, self._ended)
        self._services = SimulatedServices(
            {service.name: service for service in fleet.services},
            fleet.service_times,
            time,
            fails,
            tell,
            self._ended,
        )

    # -- hosts -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Declare the services, let the hosts join, and schedule what happens to them."""
        if self._fleet.services:
            self._tell(ev.PoolsDeclared(self._time.now_s, (), self._fleet.services))
        faults = self._fleet.faults
        for number, host in enumerate(self._fleet.action_hosts):
            if (joins_s := faults.hosts_join.get(number, 0.0)) > 0.0:
                self._time.at(joins_s, self._join, host)
            else:
                self._join(host)
            if number in faults.hosts_drain:
                self._time.at(faults.hosts_drain[number], self._drain, host.host_id)
            if number in faults.hosts_lost:
                self._time.at(faults.hosts_lost[number], self._lose, host.host_id)

    def _join(self, host: HostDescription) -> None:
        self._tell(ev.HostJoined(self._time.now_s, host))

    def _drain(self, host_id: HostId) -> None:
        self._tell(ev.HostDraining(self._time.now_s, host_id))

    def release(self, command: cmd.ReleaseHost) -> None:
        """A drained host is empty: it goes."""
        self._time.after(0.0, self._lose, command.host_id)

    def _lose(self, host_id: HostId) -> None:
        self._tools.lose(host_id)
        self._services.lose(host_id)
        self._tell(ev.HostLost(self._time.now_s, host_id))

    # -- calls -------------------------------------------------------------------------------------------------

    def plain(self, tool: str, tool_s: float) -> PlannedAction:
        """A tool call of which only the seconds are known: a CPU for so long, or none if tools take no CPU."""
        cpus = 1 if self._fleet.tool_cpus else 0
        return PlannedAction(tool, DurationProfile(tool_s), ResourceDemand.of(cpus=cpus))

    def call(self, program: Program, name: str, work: PlannedAction) -> None:
        delay_s = self._fleet.delays.action_s
        self._time.after(delay_s, self._request, program, name, work, self._time.now_s)

    def _request(self, program: Program, name: str, work: PlannedAction, asked_s: float) -> None:
        if program.status:
            return
        trajectory_id = TrajectoryId(program.plan.trajectory_id)
        self._programs[trajectory_id] = program
        managed = self._unmanaged is None
        request = ActionRequest(
            ActionId(f"{trajectory_id}:{name}"),
            trajectory_id,
            work.kind,
            work.label,
            work.demand if managed else ResourceDemand(),
            pool=work.pool if managed else "cpu",
            service=work.service,
            sandbox=trajectory_id if work.in_sandbox and managed else "",
            profile=work.declared,
            timeout_s=work.timeout_s,
            sandbox_memory_bytes=work.sandbox_bytes if managed else 0,
        )
        self.all[request.action_id] = SimulatedCall(request, work, asked_s)
        self._tell(ev.ActionRequested(self._time.now_s, request))

    def _body_of(self, call: SimulatedCall) -> ActionBody:
        if call.request.service or call.request.demand[GPUS].most:
            return self._services
        return self._unmanaged or self._tools

    def run(self, command: cmd.RunAction) -> None:
        call = self.all[command.action_id]
        self._body_of(call).run(command, call)

    def carry_out(self, command: ServiceCommand) -> None:
        """Load or evict a model service."""
        self._services.carry_out(command)

    def abort(self, command: cmd.AbortAction) -> None:
        self._body_of(self.all[command.action_id]).abort(command.action_id)

    def give_up(self, command: cmd.GiveUpAction) -> None:
        """The call fails: a program ends without its tool; a reward stays unknown."""
        call = self.all[command.action_id]
        call.cause = command.cause
        if call.work.kind == "reward":
            self._time.after(0.0, self._return, call)
        else:
            self._given_up(self._programs[call.trajectory_id])

    def trajectory_ended(self, trajectory_id: TrajectoryId) -> None:
        (self._unmanaged or self._tools).trajectory_ended(trajectory_id)

    def _ended(self, event: ev.ActionFinished, call: SimulatedCall) -> None:
        self._tell(event)
        self._return(call)

    def _return(self, call: SimulatedCall) -> None:
        program = self._programs[call.trajectory_id]
        if not program.status:
            self._time.after(self._fleet.delays.action_s, self._arrive, program, call)

    def _arrive(self, program: Program, call: SimulatedCall) -> None:
        if not program.status:
            call.back_s = self._time.now_s
            self._returned(program, call)
