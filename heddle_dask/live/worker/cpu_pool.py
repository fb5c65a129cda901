"""The cores, the memory and the scratch space of one tool worker, and what each of its actions has of them."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distributed import Worker

from heddle_dask.core.errors import BadInput
from heddle_dask.core.resources import CPUS, MEMORY, Resources
from heddle_dask.engines.address import private_directory
from heddle_dask.isolation.cgroups import CGROUP_VARIABLE, Cgroup, CgroupTree, FoundCgroups, find_cgroups
from heddle_dask.isolation.cores import CoreAllocator, CoreClaim, claim_cores, memory_bytes, own_cores
from heddle_dask.isolation.granted import Granted, cpu_variables, yield_cpus
from heddle_dask.isolation.mechanism import Mechanism
from heddle_dask.isolation.process_tree import live_processes
from heddle_dask.live.wire.messages import MEMORY_VARIABLE, ActionCall
from heddle_dask.live.worker.call_terms import CallTerms
from heddle_dask.live.worker.running_call import RunningCall
from heddle_dask.sandbox.program_files import remove

_MORE_THREADS = 32


@dataclass(slots=True, eq=False)
class CoreLease:
    """What one running action has."""

    resources: Resources  # what the controller has granted
    reach_cpus: int = 0  # CPUs that it may use in all, those of others while they are idle; 0: its own alone
    nice: int = 0  # with which it does
    own_cores: tuple[int, ...] = ()
    # What processes that it starts from the worker's loop are held to; without cores until these are taken.
    granted: Granted = field(default_factory=Granted)
    # The terms and limits of its process, where it has one.
    call: RunningCall = field(default_factory=RunningCall)
    group: Cgroup | None = None
    over: bool = False
    # What its call of an API has used, as it says.
    used_tokens: int | None = None
    used_cost: float | None = None

    def use(self, tokens: int, cost: float) -> None:
        """See `Granted.use`."""
        if tokens >= 0:
            self.used_tokens = (self.used_tokens or 0) + tokens
        if cost >= 0:
            self.used_cost = (self.used_cost or 0.0) + cost


class CpuPool:
    def __init__(
        self,
        # Declared CPUs. Where these are more than the worker has cores for itself, its actions share cores.
        cpus: int,
        limit_bytes: int,  # declared memory; 0: that of the machine, or of the worker's control group
        scratch: Path,  # a directory of the worker's own
        claims: Path | None,  # where tool workers of this user on this machine claim cores
        # The control groups of this process; used as far as groups can be made below them.
        found: FoundCgroups,
    ) -> None:
        cores = own_cores()
        self._claim = CoreClaim(shared_because="no directory for claims of cores can be made")
        if claims is not None:
            self._claim = claim_cores(claims, cpus, cores)
        self._allocator = CoreAllocator(self._claim.cores)
        self._exclusive = not self._claim.shared_because
        self._returned = asyncio.Event()
        # Where control groups are made; None: nowhere.
        self.groups = CgroupTree.open(found, self._claim.cores or cores)
        self.mechanism = Mechanism.of(self.groups, self._claim.shared_because)  # what keeps actions apart
        limit_bytes = limit_bytes or memory_bytes(found.folders)
        self.resources = Resources.of(cpus=cpus, memory_bytes=limit_bytes)  # for the controller
        self._scratch = scratch
        self._scratches = 0
        self._empty_scratches: list[str] = []
        self._user_threads_seen_s = float("-inf")
        self._user_threads = 0

    @classmethod
    def of_worker(cls, worker: Worker, cpus: int) -> CpuPool:
        """The pool of a Dask worker, from its options and environment."""
        given = os.environ.get(MEMORY_VARIABLE, "")
        limit_bytes = int(given) if given.isdigit() else (worker.memory_manager.memory_limit or 0)
        found = find_cgroups(delegated=os.environ.get(CGROUP_VARIABLE))
        return cls(cpus, limit_bytes, Path(worker.local_directory) / "actions", claims_directory(), found)

    async def take(self, lease: CoreLease, call: ActionCall) -> None:
        """Give an action its cores, and a scratch directory for a process of its own.

        The cores are free, as the controller has granted them; except where an action of a driver that has died still
        has them, which the controller of the next run does not know. Then this waits for it.
        """
        cpus, memory = lease.resources[CPUS], lease.resources[MEMORY]
        while self._exclusive and self._allocator.free < cpus:
            self._returned.clear()
            await self._returned.wait()
        lease.own_cores = cores = self._allocator.take(cpus) if self._exclusive else ()
        nice = lease.nice if lease.reach_cpus > cpus else 0
        if nice:
            cpus = lease.reach_cpus
            cores = self._allocator.reach(cores, cpus) if self._exclusive else ()
        lease.granted = Granted(
            cpus, cores, lease.own_cores, memory, nice, lambda pid: self._adopt(lease, pid), lease.use
        )
        if call.place != "loop":
            lease.call = self._running_call(call, lease.granted)
            lease.call.use = lease.use

    def _running_call(self, call: ActionCall, given: Granted) -> RunningCall:
        cpus, cores, memory = given.cpus, given.cores, given.memory_bytes
        has: Mapping[str, Path] = {} if self.groups is None else self.groups.folders
        scratch = self._new_scratch()
        terms = CallTerms(
            cpus,
            cores,  # also where a cpuset holds them: programs ask for their affinity
            {**cpu_variables(cpus), "TMPDIR": scratch},
            memory_bytes=0 if "memory" in has else memory,
            file_bytes=call.max_disk_bytes,
            user_threads=0 if "pids" in has else self._most_user_threads(call.max_processes),
            nice=given.nice,
        )
        return RunningCall(terms, cores, memory, call.max_processes, scratch, call.max_disk_bytes)

    def _new_scratch(self) -> str:
        if self._empty_scratches:
            return self._empty_scratches.pop()
        self._scratches += 1
        path = self._scratch / str(self._scratches)
        path.mkdir(parents=True, mode=0o700)
        return str(path)

    def _most_user_threads(self, of_action: int) -> int:
        """RLIMIT_NPROC for an action: what the user has now, and its own. Root has no such limit (0).

        Above the limit of the action, so that the watch sees that it is exceeded: a program that forks again whenever
        it is refused would otherwise never end.
        """
        if os.geteuid() == 0:
            return 0
        now_s = asyncio.get_running_loop().time()
        if now_s - self._user_threads_seen_s > 1.0:
            self._user_threads_seen_s = now_s
            self._user_threads = threads_of_user(os.getuid())
        return self._user_threads + of_action + _MORE_THREADS

    def _adopt(self, lease: CoreLease, pid: int) -> None:
        """Hold a process that the worker itself has started for an action to the cores of the action."""
        if lease.granted.nice:
            yield_cpus(pid, lease.granted.nice)
        if lease.over or self.groups is None or not lease.granted.cores:
            return
        try:
            if lease.group is None:
                lease.group = self.groups.make()
                lease.group.set_cores(lease.granted.cores)
            lease.group.add(pid)
        except OSError:
            return  # its affinity holds it

    async def give_back(self, lease: CoreLease) -> None:
        """The action has ended: end what is left of it; its cores are free when this returns."""
        lease.over = True
        try:
            if lease.group is not None and self.groups is not None:
                if lease.group.pids():
                    await asyncio.to_thread(lease.group.kill)
                self.groups.discard(lease.group)
        finally:
            self._allocator.give_back(lease.own_cores)
            self._returned.set()
            scratch = lease.call.scratch
            if scratch and _is_as_new(scratch):
                # Kept for another action: making and removing a directory waits for a busy disk.
                self._empty_scratches.append(scratch)
            elif scratch:
                await asyncio.to_thread(remove, scratch)

    def close(self) -> None:
        """Give up the cores, and remove control groups and scratch space."""
        if self.groups is not None:
            self.groups.close()
        self._claim.close()
        if self._scratch.exists():
            remove(str(self._scratch))


def _is_as_new(scratch: str) -> bool:
    """Whether a scratch directory is empty, and this user's alone."""
    try:
        return stat.S_IMODE(os.stat(scratch).st_mode) == 0o700 and not os.listdir(scratch)
    except OSError:
        return False


def claims_directory() -> Path | None:
    """Where all tool workers of this user on this machine claim cores; None where it cannot be made."""
    try:
        return private_directory(Path(tempfile.gettempdir()) / f"heddle-cores-{os.getuid()}")
    except BadInput:
        return None


def threads_of_user(uid: int) -> int:
    total = 0
    for pid, facts in live_processes().items():
        try:
            total += facts.threads if os.stat(f"/proc/{pid}").st_uid == uid else 0
        except FileNotFoundError:
            continue
    return total
