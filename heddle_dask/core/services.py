"""Model services on GPUs: evict on execution (ARL-Tangram, section 5.3), with batches and a turn for every service.

A strategy grants an action a host and a number of GPUs. Which chunk these are is decided here (`choose_chunk`); cached
copies leave it, the least recently used first, until its memory has room. The action starts once its service is
resident.

Beyond the paper:

- A request joins a busy copy of its service that has a free place. That takes no chunk, and no grant of a strategy. A
  copy whose last request ends goes on with the next one of its service at once: a load less.
- Joining for ever would starve other services, so copies have turns. When the oldest request of another service is
  older than all that wait for a busy copy, and no chunk is free for it, that service is *next* on the chunk. After
  `TURN_LOADS` times the seconds of its load, the busy copy takes no more requests.
- A service that is next on a chunk is loaded at once where memory has room beside the copy that runs
  (`MODELS_PER_GPU`), so that its turn begins with the end of the other's.
- Copies in host memory are kept within the host's budget (`COPY_BYTES`), the least recently used dropped first. Weights
  do not change, so an eviction writes nothing back; a service without a copy is loaded from its files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from heddle_dask.core import events as ev
from heddle_dask.core.commands import Command, DropServiceCopy, EvictService, LoadService, RunAction
from heddle_dask.core.entities import Action, Host
from heddle_dask.core.gpu_chunks import GpuChunk
from heddle_dask.core.ids import HostId
from heddle_dask.core.resources import GPUS, ModelService, Resources, api_of
from heddle_dask.core.service_copies import ServiceCopy, choose_chunk
from heddle_dask.core.state import State
from heddle_dask.core.transitions import ActionEvent, CopyEvent, CopyState

TURN_LOADS = 4.0
"""A turn lasts at least this many times the load of the next service: loads take at most a fifth of the time."""


@dataclass(frozen=True, slots=True)
class NextTurn:
    """Where a service that waits is the next one."""

    host_id: HostId
    chunk: GpuChunk


class ServiceTurns:
    """Names for each service that waits in vain the chunk on which it is next; at most one for a service.

    Attributes
    ----------
    following
        The next turn of each service that has one.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.following: dict[str, NextTurn] = {}

    def is_over(self, copy: ServiceCopy) -> bool:
        """Whether the turn of a busy copy is over: it ends with the requests that it has."""
        lasted_s = self.state.at - copy.turn_began_at
        return any(
            turn.host_id == copy.host_id
            and service != copy.service
            and turn.chunk.overlaps(copy.chunk)
            and lasted_s >= self._least_s(service, turn)
            for service, turn in self.following.items()
        )

    def _least_s(self, service: str, turn: NextTurn) -> float:
        """How long a turn lasts at least before this service follows; it may follow at once where it is resident."""
        host = self.state.hosts[turn.host_id]
        there = host.gpus.copies.get((service, turn.chunk))
        if there is not None and there.state is CopyState.RESIDENT:
            return 0.0
        return TURN_LOADS * (self.load_s(self.state.services[service], host, turn.chunk.gpus) or 0.0)

    def load_s(self, service: ModelService, host: Host, gpus: int) -> float | None:
        """Expected seconds of a load on this host; None when nothing is known."""
        cold = (service.name, gpus) not in host.gpus.kept
        return self.state.load_seconds.expected(service, gpus, cold)

    def is_next(self, copy: ServiceCopy) -> bool:
        return self.following.get(copy.service) == NextTurn(copy.host_id, copy.chunk)

    def refresh(self) -> None:
        """Name the next turns anew: for services that begin to wait, and without hosts that are gone."""
        queues = self.state.service_queues
        for service, turn in list(self.following.items()):
            host = self.state.hosts.get(turn.host_id)
            if service not in queues or host is None or host.draining:
                del self.following[service]
        if len(self.following) == len(queues):
            return
        oldest = {service: self.state.actions[next(iter(queue))] for service, queue in queues.items()}
        numbers = {service: action.number for service, action in oldest.items()}
        for service, action in sorted(oldest.items(), key=lambda each: each[1].number):
            if service not in self.following:
                found = self._turn_for(action, numbers)
                if found is not None:
                    self.following[service] = found

    def _turn_for(self, action: Action, oldest: Mapping[str, int]) -> NextTurn | None:
        """The chunk whose turn began first, among those for which only younger requests wait."""
        hosts = [h for h in self.state.hosts.values() if not h.draining and h.spec.pool == action.spec.pool]
        best: tuple[tuple[bool, float], NextTurn] | None = None
        for host in hosts:
            gpus, free = host.gpus.buddies.gpus, host.gpus.buddies.counts()
            for size in action.spec.demand[GPUS].up_to(gpus):
                if free.take(size) is not None:
                    return None  # a chunk is free: its grant is up to the strategy
                for first in range(0, gpus - size + 1, size):
                    turn = NextTurn(host.spec.host_id, GpuChunk(first, size))
                    rank = self._rank(host, action, turn, oldest)
                    if rank is not None and (best is None or rank < best[0]):
                        best = rank, turn
        return None if best is None else best[1]

    def _rank(self, host: Host, action: Action, turn: NextTurn, oldest: Mapping[str, int]) -> tuple[bool, float] | None:
        taken = self.following.values()
        if any(t.host_id == turn.host_id and t.chunk.overlaps(turn.chunk) for t in taken):
            return None
        busy = [copy for copy in host.gpus.on(turn.chunk) if copy.busy]
        for copy in busy:
            if copy.service in ("", action.spec.service):
                return None
            if oldest.get(copy.service, action.number) < action.number:
                return None
        cached = (action.spec.service, turn.chunk) in host.gpus.copies
        return not cached, max((copy.turn_began_at for copy in busy), default=self.state.at)


ServiceReport = ev.ServiceLoaded | ev.ServiceEvicted | ev.ServiceLost


class ServicePool:
    """The controller's handler of chunks of GPUs, and of copies of model services on them.

    Parameters
    ----------
    max_failures
        Failed loads of one service in a row after which it is tried again; after the next one its waiting actions are
        given up.
    """

    def __init__(self, state: State, max_failures: int) -> None:
        self.state = state
        self.max_failures = max_failures
        self.turns = ServiceTurns(state)
        self._failures: dict[str, int] = {}  # in a row, by service
        self._clearing: list[ServiceCopy] = []  # copies that wait for memory

    # -- places for actions ------------------------------------------------------------------------------------

    def joining(self) -> Iterator[tuple[Action, ServiceCopy]]:
        """Waiting actions with a place on a busy copy, the oldest of a service first; each is to `enter` its copy."""
        for service in list(self.state.service_queues):
            while queue := self.state.service_queues.get(service):
                action = self.state.actions[next(iter(queue))]
                copy = self.joinable(action)
                if copy is None:
                    break
                yield action, copy

    def joinable(self, action: Action, host_id: HostId | None = None, *, idle: bool = True) -> ServiceCopy | None:
        """The copy of its service with most free places, of those whose turn goes on.

        Parameters
        ----------
        host_id
            Only copies on this host [default: on any].
        idle
            Also a copy whose last request has ended in this moment; it takes a chunk, so it is no place for an action
            of which the strategy has granted another one.
        """
        demand = action.spec.demand
        if any(api_of(name) is not None for name in demand.names):
            return None  # a call of an API needs a grant
        beside = Resources.of({name: each.least for name, each in demand if name != GPUS})
        best: ServiceCopy | None = None
        for copy in self.state.copies_of.get(action.spec.service, {}).values():
            if copy.free_places > (0 if best is None else best.free_places):
                host = self.state.hosts[copy.host_id]
                if not copy.busy and not (idle and self._goes_on(copy, host)):
                    continue
                allowed = host_id in (None, copy.host_id) and copy.chunk.gpus in demand[GPUS]
                open_ = copy.state is not CopyState.LOST and not host.draining and not self.turns.is_over(copy)
                if allowed and open_ and host.fits(beside):
                    best = copy
        return best

    def _goes_on(self, copy: ServiceCopy, host: Host) -> bool:
        """Whether an idle copy has its chunk for one more request: its last one has ended in this moment."""
        return copy.idle and copy.used_at == self.state.at and host.gpus.buddies.is_free(copy.chunk)

    def chosen(self, action: Action, host: Host, gpus: int, later: Sequence[int]) -> ServiceCopy | None:
        """The copy on a free chunk of this host that the action is to `enter`.

        Parameters
        ----------
        later
            Numbers of GPUs of the grants on this host that follow in the same pass.

        Returns
        -------
        None where no chunk of this size is free: the action goes on waiting.
        """
        service = self.state.services.get(action.spec.service)
        name = action.spec.service
        chunk = choose_chunk(host.gpus, name, gpus, later)
        if chunk is None:
            return None
        copy = host.gpus.copies.get((name, chunk))
        return copy or self._add(host, name, chunk, 1 if service is None else service.batch)

    def _add(self, host: Host, service: str, chunk: GpuChunk, places: int) -> ServiceCopy:
        copy = ServiceCopy(service, host.spec.host_id, chunk, max(1, places))
        self.state.add_copy(copy)
        self._clearing.append(copy)
        return copy

    def enter(self, action: Action, copy: ServiceCopy) -> list[Command]:
        """Give the action a place on the copy; it starts now, or once the copy is resident."""
        host = self.state.hosts[copy.host_id]
        if not copy.busy:
            host.gpus.buddies.take(copy.chunk)
            host.refresh_free_gpus()
            if not (copy.idle and copy.used_at == self.state.at):
                copy.turn_began_at = self.state.at
                self.turns.following.pop(copy.service, None)
        action.copy = copy
        if copy.state is CopyState.RESIDENT:
            return [self._start(action, copy)]
        copy.waiting[action.spec.action_id] = None
        action.advance(ActionEvent.GRANTED)
        return []

    def _start(self, action: Action, copy: ServiceCopy) -> RunAction:
        name, chunk = action.spec.action_id, copy.chunk
        copy.running[name] = None
        action.advance(ActionEvent.STARTED)
        action.started_at = self.state.at
        waits = replace(action.waits, load_s=self.state.at - action.granted_at)
        return RunAction(name, copy.host_id, action.resources, waits, chunk.first, chunk.gpus)

    def leave(self, action: Action) -> None:
        """Take an action that has ended, was cancelled, or is to wait again off its copy."""
        copy, action.copy = action.copy, None
        if copy is None:
            return
        copy.running.pop(action.spec.action_id, None)
        copy.waiting.pop(action.spec.action_id, None)
        if copy.busy:
            return
        copy.used_at = self.state.at
        host = self.state.hosts[copy.host_id]
        host.gpus.buddies.give_back(copy.chunk)
        host.refresh_free_gpus()
        if copy.state in (CopyState.LOST, CopyState.CLEARING):
            self._end(copy, CopyEvent.UNUSED)
        elif not copy.service:  # what the action had in GPU memory is gone with it
            self._end(copy, CopyEvent.EVICT_ORDERED, CopyEvent.EVICTED)

    def _end(self, copy: ServiceCopy, *events: CopyEvent) -> None:
        for event in events:
            copy.advance(event)
        assert copy.state is CopyState.GONE, copy
        self.state.remove_copy(copy)
        if copy in self._clearing:
            self._clearing.remove(copy)

    # -- memory of GPUs ----------------------------------------------------------------------------------------

    def make_room(self) -> list[Command]:
        """Name the services that are next, and go on with all copies that wait for memory."""
        if self.state.service_queues or self.turns.following:
            self.turns.refresh()
            self._load_ahead()
        commands: list[Command] = []
        for copy in sorted(self._clearing, key=lambda copy: not copy.busy):
            if not copy.busy and not self.turns.is_next(copy):
                self._end(copy, CopyEvent.UNUSED)
                continue
            gpus = self.state.hosts[copy.host_id].gpus
            while (victim := gpus.victim(copy)) is not None:
                victim.advance(CopyEvent.EVICT_ORDERED)
                chunk = victim.chunk
                commands.append(EvictService(copy.host_id, victim.service, chunk.first, chunk.gpus))
            if gpus.has_room(copy):
                commands += self._load(copy)
        return commands

    def _load_ahead(self) -> None:
        """Begin with the copies of services that are next, where memory may have room beside those that run."""
        for name, turn in self.turns.following.items():
            host = self.state.hosts[turn.host_id]
            if host.gpus.models_per_gpu == 1 or (name, turn.chunk) in host.gpus.copies:
                continue
            if host.gpus.could_make_room(ServiceCopy(name, turn.host_id, turn.chunk)):
                self._add(host, name, turn.chunk, self.state.services[name].batch)

    def _load(self, copy: ServiceCopy) -> list[Command]:
        self._clearing.remove(copy)
        copy.advance(CopyEvent.ROOM_MADE)
        if not copy.service:
            copy.advance(CopyEvent.LOADED)
            return self._start_waiting(copy)
        gpus, chunk = self.state.hosts[copy.host_id].gpus, copy.chunk
        copy.cold = copy.memory_key not in gpus.kept
        dropped = gpus.keep(copy, self.state.services[copy.service].host_bytes)
        kept = copy.memory_key in gpus.kept
        drops = [DropServiceCopy(copy.host_id, name, size) for name, size in dropped]
        return [*drops, LoadService(copy.host_id, copy.service, chunk.first, chunk.gpus, copy.cold, kept)]

    def _start_waiting(self, copy: ServiceCopy) -> list[Command]:
        starting, copy.waiting = copy.waiting, {}
        return [self._start(self.state.actions[name], copy) for name in starting]

    # -- reports of hosts --------------------------------------------------------------------------------------

    def reported(self, event: ServiceReport, change: CopyEvent) -> ServiceCopy | None:
        """The copy of a report, after its transition; None when the report is stale."""
        host = self.state.hosts.get(event.host_id)
        chunk = GpuChunk(event.first_gpu, event.gpus)
        copy = None if host is None else host.gpus.copies.get((event.service, chunk))
        if copy is None or not copy.advance(change):
            return None
        self.state.freed_hosts[event.host_id] = None
        return copy

    def loaded(self, copy: ServiceCopy, seconds: float) -> list[Command]:
        """A copy has become resident: the actions that waited for it start."""
        self._failures.pop(copy.service, None)
        copy.used_at = self.state.at
        if not copy.busy:
            copy.turn_began_at = self.state.at
        service = self.state.services[copy.service]
        self.state.load_seconds.took(service, copy.chunk.gpus, copy.cold, seconds)
        return self._start_waiting(copy)

    def load_failed(self, copy: ServiceCopy) -> tuple[list[Command], list[Action]]:
        """A load has failed; returns commands, and the actions that waited for it, which have no place now."""
        back = [self.state.actions[name] for name in copy.waiting]
        self.state.remove_copy(copy)
        for action in back:
            action.copy = None
        return self._drop_kept(copy), back

    def failed_too_often(self, service: str, cause: str) -> str:
        """Count a failed load; returns why the waiting actions of the service are given up, empty: they wait on."""
        failures = self._failures[service] = self._failures.get(service, 0) + 1
        if failures <= self.max_failures:
            return ""
        del self._failures[service]
        return f"model service '{service}' could not be loaded {failures} times: {cause}"

    def lost(self, copy: ServiceCopy) -> list[Command]:
        """A resident copy has died."""
        if not copy.busy:
            self._end(copy, CopyEvent.UNUSED)
        return self._drop_kept(copy)

    def _drop_kept(self, copy: ServiceCopy) -> list[Command]:
        """Do not restore from a copy in host memory that may be the fault, or may have died with its process."""
        gpus = self.state.hosts[copy.host_id].gpus
        if copy.memory_key not in gpus.kept or gpus.restoring(copy.memory_key, without=copy):
            return []
        del gpus.kept[copy.memory_key]
        return [DropServiceCopy(copy.host_id, *copy.memory_key)]

    def host_lost(self, host: Host) -> None:
        """Everything on the GPUs of a host is gone; its actions have left their copies."""
        for copy in list(host.gpus.copies.values()):
            self.state.remove_copy(copy)
        self._clearing = [copy for copy in self._clearing if copy.host_id != host.spec.host_id]
