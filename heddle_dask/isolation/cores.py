"""Which core each action has: a pure allocator over the cores of one worker.

A core serves one action at a time, and the cores of an action are on as few NUMA nodes as possible (ARL-Tangram,
section 5.2: the manager picks the exact core set).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path


class CoreAllocator:
    """The free cores of one worker, by NUMA node.

    Parameters
    ----------
    nodes
        The NUMA node of each core.
    """

    def __init__(self, nodes: Mapping[int, int]) -> None:
        self._node_of = dict(nodes)
        self._free: dict[int, set[int]] = {node: set() for node in sorted(set(nodes.values()))}
        for core, node in nodes.items():
            self._free[node].add(core)

    @property
    def free(self) -> int:
        """Number of cores that no action has."""
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
        """Give the cores up."""
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
