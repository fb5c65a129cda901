"""Cores that a tool worker has for itself: no other tool worker of this user on this machine takes them.

A claim is a locked file for each core. The kernel drops the locks with the process, however it ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from heddle_dask.isolation.cores import CoreAllocator


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
