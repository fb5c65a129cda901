"""Hosts of GPUs with model services in virtual time: loads, evictions, and requests that share a copy."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.ids import ActionId, HostId, TrajectoryId
from heddle_dask.core.resources import ModelService
from heddle_dask.sim.fleet import FAILED_TOOL_SHARE, ServiceTimes
from heddle_dask.sim.loop import VirtualTime
from heddle_dask.sim.program import SimulatedCall

ServiceCommand = cmd.LoadService | cmd.EvictService | cmd.DropServiceCopy
_Place = tuple[HostId, str, int]


@dataclass(slots=True, eq=False)
class _Request:
    """A running request: the seconds that it would still run alone, and what ends it."""

    call: SimulatedCall
    left_s: float
    cause: str
    began_s: float


@dataclass(slots=True, eq=False)
class _Batch:
    """The requests that run on one copy, or the one action that has a chunk for itself."""

    host_id: HostId
    requests: dict[ActionId, _Request] = field(default_factory=dict)
    at_s: float = 0.0
    version: int = 0


class SimulatedServices:
    """Carries out loads, evictions and requests of model services, and actions that have GPUs for themselves.

    Parameters
    ----------
    ended
        Takes the report of each action that has ended or was aborted, and its call.
    seed
        Of the loads that fail.

    Attributes
    ----------
    loads, load_s
        Number of loads that have succeeded, and their seconds.
    """

    def __init__(
        self,
        services: Mapping[str, ModelService],
        times: ServiceTimes,
        time: VirtualTime,
        fails: Callable[[ActionId], bool],
        tell: Callable[[ev.Event], None],
        ended: Callable[[ev.ActionFinished, SimulatedCall], None],
        seed: int = 0,
    ) -> None:
        self.loads = 0
        self.load_s = 0.0
        self._services = services
        self._times = times
        self._time = time
        self._fails = fails
        self._tell = tell
        self._ended = ended
        self._rng = random.Random(seed)
        self._batches: dict[_Place, _Batch] = {}
        self._places: dict[ActionId, _Place] = {}
        self._lost: set[HostId] = set()

    # -- copies ------------------------------------------------------------------------------------------------

    def carry_out(self, command: ServiceCommand) -> None:
        """Begin a load or an eviction; copies in host memory are not simulated but by the seconds of loads."""
        match command:
            case cmd.LoadService():
                seconds = self._times.load_s(self._services[command.service], command.gpus, command.cold)
                ok = self._rng.random() >= self._times.failure_share
                seconds = seconds if ok else FAILED_TOOL_SHARE * seconds
                self._time.after(seconds, self._loaded, command, seconds, ok)
            case cmd.EvictService():
                self._time.after(self._times.evict_s, self._evicted, command)
            case cmd.DropServiceCopy():
                pass

    def _loaded(self, command: cmd.LoadService, seconds: float, ok: bool) -> None:
        if command.host_id in self._lost:
            return
        self.loads += ok
        self.load_s += seconds if ok else 0.0
        where = (command.host_id, command.service, command.first_gpu, command.gpus)
        self._tell(ev.ServiceLoaded(self._time.now_s, *where, ok, seconds, "" if ok else "simulated fault"))

    def _evicted(self, command: cmd.EvictService) -> None:
        if command.host_id not in self._lost:
            where = (command.host_id, command.service, command.first_gpu, command.gpus)
            self._tell(ev.ServiceEvicted(self._time.now_s, *where))

    # -- requests ----------------------------------------------------------------------------------------------

    def run(self, command: cmd.RunAction, call: SimulatedCall) -> None:
        """Begin a request on its copy: all that run there become slower."""
        seconds, cause = call.work.profile.seconds(command.gpus), ""
        if self._fails(call.action_id):
            seconds, cause = FAILED_TOOL_SHARE * seconds, "raised"
        call.begun_s, call.units = self._time.now_s, command.gpus
        place = (command.host_id, call.request.service or call.action_id, command.first_gpu)
        batch = self._batches.setdefault(place, _Batch(command.host_id))
        self._advance(batch)
        batch.requests[call.action_id] = _Request(call, seconds, cause, self._time.now_s)
        self._places[call.action_id] = place
        self._schedule(batch)
        if call.work.timeout_s is not None:
            self._time.after(call.work.timeout_s, self._stop, call.action_id, call.begun_s, "timeout")

    def abort(self, action_id: ActionId) -> None:
        """End a running request now; without effect on one that has ended or was lost."""
        place = self._places.get(action_id)
        if place is not None:
            began_s = self._batches[place].requests[action_id].began_s
            self._time.after(0.0, self._stop, action_id, began_s, "aborted")

    def _stop(self, action_id: ActionId, began_s: float, cause: str) -> None:
        place = self._places.get(action_id)
        if place is None or self._batches[place].requests[action_id].began_s != began_s:
            return
        batch = self._batches[place]
        self._advance(batch)
        batch.requests[action_id].cause = cause
        self._end(batch, action_id)
        self._schedule(batch)

    def lose(self, host_id: HostId) -> None:
        self._lost.add(host_id)
        for place in [place for place in self._batches if place[0] == host_id]:
            batch = self._batches.pop(place)
            batch.version += 1
            for action_id in batch.requests:
                del self._places[action_id]

    def trajectory_ended(self, trajectory_id: TrajectoryId) -> None:
        """Nothing is kept for a trajectory."""

    # -- sharing -----------------------------------------------------------------------------------------------

    def _slowdown(self, batch: _Batch) -> float:
        return 1.0 + self._times.batch_cost * (len(batch.requests) - 1)

    def _advance(self, batch: _Batch) -> None:
        """Count the time since the last change of the batch."""
        done_s = (self._time.now_s - batch.at_s) / self._slowdown(batch) if batch.requests else 0.0
        for request in batch.requests.values():
            request.left_s -= done_s
        batch.at_s = self._time.now_s

    def _schedule(self, batch: _Batch) -> None:
        """Schedule the next end of a request, which supersedes the one scheduled before."""
        batch.version += 1
        if batch.requests:
            action_id, request = min(batch.requests.items(), key=lambda item: item[1].left_s)
            after_s = max(0.0, request.left_s) * self._slowdown(batch)
            self._time.after(after_s, self._next_end, batch, batch.version, action_id)

    def _next_end(self, batch: _Batch, version: int, action_id: ActionId) -> None:
        if version == batch.version:
            self._advance(batch)
            self._end(batch, action_id)
            self._schedule(batch)

    def _end(self, batch: _Batch, action_id: ActionId) -> None:
        request = batch.requests.pop(action_id)
        place = self._places.pop(action_id)
        if not batch.requests:
            del self._batches[place]
        call, run_s = request.call, self._time.now_s - request.began_s
        call.run_s, call.cause = run_s, request.cause
        ok = not request.cause
        event = ev.ActionFinished(self._time.now_s, action_id, batch.host_id, run_s, ok=ok, cause=request.cause)
        # Its place is free before the controller hears of it: what it commands next may run there.
        self._time.after(0.0, self._ended, event, call)
