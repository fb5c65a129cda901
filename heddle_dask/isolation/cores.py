"""Cores: what this process may use of its machine, which core each action has, and claims of tool workers.

A core serves one action at a time, and the cores of an action are on as few NUMA nodes as possible (ARL-Tangram,
section 5.2: the manager picks the exact core set).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_MEMINFO = Path("/proc/meminfo")


def own_cores(nodes_folder: Path = _NODES) -> dict[int, int]:
    """The cores on which this process may run (its affinity, which follows its cpuset), with their NUMA nodes."""
    nodes = numa_nodes(nodes_folder)
    return {core: nodes.get(core, 0) for core in sorted(os.sched_getaffinity(0))}


def numa_nodes(folder: Path = _NODES) -> dict[int, int]:
    """The NUMA node of each core, as the kernel lists them; empty where it lists none."""
    nodes: dict[int, int] = {}
    for place in sorted(folder.glob("node[0-9]*")):
        try:
            cores = parsed_list((place / "cpulist").read_text(encoding="ascii"))
        except OSError:
            continue
        nodes |= dict.fromkeys(cores, int(place.name.removeprefix("node")))
    return nodes


def parsed_list(text: str) -> list[int]:
    """The numbers of a list of the kernel: ``0-3,8``."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def memory_bytes(cgroup_folders: Mapping[str, Path]) -> int:
    """Memory of this machine in bytes, or of the control group of this process where that is less.

    Parameters
    ----------
    cgroup_folders
        Folder of the group of this process by controller, as `cgroups.find_cgroups` returns them.
    """
    total = 0
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    folder = cgroup_folders.get("memory")
    while folder is not None and folder != folder.parent:
        limits = [_limit(folder / name) for name in ("memory.max", "memory.limit_in_bytes")]
        total = min([total, *(limit for limit in limits if limit is not None)])
        # A group is held to the limits of all above it.
        folder = folder.parent if (folder.parent / "cgroup.procs").exists() else None
    return total


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


class CoreAllocator:
    """The free cores of one worker, by NUMA node."""

    def __init__(self, nodes: Mapping[int, int]) -> None:
        self._node_of = dict(nodes)
        self._free: dict[int, set[int]] = {node: set() for node in sorted(set(nodes.values()))}
        for core, node in nodes.items():
            self._free[node].add(core)

    @property
    def free(self) -> int:
        return sum(map(len, self._free.values()))

    def take(self, count: int) -> tuple[int, ...]:
        """Cores for one action, in ascending order.

        From one node if one has enough: the one with the fewest free cores, so that larger rooms stay whole. Otherwise
        from the nodes with most, which is the smallest number of nodes; the last of them is again the tightest.

        Raises
        ------
        ValueError
            Fewer are free: the controller's accounts and those of the worker differ.
        """
        if not 0 <= count <= self.free:
            raise ValueError(f"{count} cores are asked for, {self.free} are free")
        taken: list[int] = []
        while len(taken) < count:
            left = count - len(taken)
            enough = [(len(cores), node) for node, cores in self._free.items() if len(cores) >= left]
            if enough:
                _, node = min(enough)
            else:
                node = max(self._free, key=lambda each: (len(self._free[each]), -each))
            chosen = sorted(self._free[node])[:left]
            self._free[node].difference_update(chosen)
            taken += chosen
        return tuple(sorted(taken))

    def reach(self, own: Sequence[int], count: int) -> tuple[int, ...]:
        """These cores and others of the worker, `count` in all: idle ones first, and of the same NUMA nodes.

        The others stay those of the actions that have them, or that will.
        """
        nodes = {self._node_of[core] for core in own}

        def far(core: int) -> tuple[bool, bool, int]:
            return core not in self._free[self._node_of[core]], self._node_of[core] not in nodes, core

        others = sorted((core for core in self._node_of if core not in own), key=far)
        return tuple(sorted([*own, *others[: max(0, count - len(own))]]))

    def give_back(self, cores: Collection[int]) -> None:
        """The inverse of `take`.

        Raises
        ------
        ValueError
            One of them is free or unknown: it would serve two actions.
        """
        for core in cores:
            node = self._node_of.get(core)
            if node is None or core in self._free[node]:
                raise ValueError(f"core {core} is given back, but no action has it")
            self._free[node].add(core)


# Cores that a tool worker has for itself: no other tool worker of this user on this machine takes them.
#
# A claim is a locked file for each core. The kernel drops the locks with the process, however it ends.


@dataclass(slots=True)
class CoreClaim:
    """The claimed cores with their NUMA nodes; empty with the reason why there are none.

    Attributes
    ----------
    shared_because
        Why the worker has no cores of its own; empty: it has.
    """

    cores: dict[int, int] = field(default_factory=dict)
    shared_because: str = ""
    _locks: list[int] = field(default_factory=list)

    def close(self) -> None:
        while self._locks:
            os.close(self._locks.pop())


def claim_cores(folder: Path, wanted: int, cores: Mapping[int, int]) -> CoreClaim:
    """Claim `wanted` of these cores, on as few NUMA nodes as possible.

    Parameters
    ----------
    folder
        A directory of this user, the same for all tool workers of the machine.
    cores
        Those on which this process may run, with their NUMA nodes.
    """
    if wanted > len(cores):
        return CoreClaim(shared_because=f"{wanted} CPUs are declared, and it may run on {len(cores)}")
    everything = os.open(folder / "claims.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    locks: dict[int, int] = {}
    try:
        # Held for microseconds: two workers that start together must not see each other's half of a claim.
        fcntl.flock(everything, fcntl.LOCK_EX)
        for core in cores:
            lock = os.open(folder / f"core-{core}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
            else:
                locks[core] = lock
        if len(locks) < wanted:
            taken = len(cores) - len(locks)
            reason = f"other tool workers have {taken} of its {len(cores)} cores, and {wanted} are declared"
            return CoreClaim(shared_because=reason)
        chosen = CoreAllocator({core: cores[core] for core in locks}).take(wanted)
        return CoreClaim({core: cores[core] for core in chosen}, _locks=[locks.pop(core) for core in chosen])
    finally:
        for lock in locks.values():
            os.close(lock)
        os.close(everything)
