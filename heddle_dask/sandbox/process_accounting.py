"""Counts the processes of sandboxed runs and their memory, for limits that the kernel does not enforce.

All runs of an event loop share one scan of /proc, made in a thread if the last scan is older than `period_s`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from heddle_dask.isolation.process_tree import live_processes
from heddle_dask.sandbox.confinement import DiskUsage, PreparedRun

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_FIRST_LOOK_S = 0.1
_LONGEST_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """One process in /proc."""

    pid: int
    parent: int
    uid: int
    threads: int
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of one run: its processes, the number of threads, and their resident bytes."""

    pids: tuple[int, ...]
    threads: int
    resident_bytes: int


class ProcessAccounting:
    """Shared view of all processes of this machine."""

    def __init__(self, period_s: float = 0.1) -> None:
        self._period_s = period_s
        self._taken_s = float("-inf")
        self._facts: Sequence[ProcessFacts] = ()
        self._taking = asyncio.Lock()

    async def usage(self, prepared: PreparedRun, root: int) -> Usage:
        """Usage of the run with first process `root`, at most `period_s` old."""
        return usage_of(await self._recent(), prepared.owned_uid, root)

    async def tree_usage(self, root: int) -> Usage:
        """Usage of `root` and all processes below it, at most `period_s` old."""
        return usage_of(await self._recent(), None, root)

    async def _recent(self) -> Sequence[ProcessFacts]:
        async with self._taking:
            if time.monotonic() - self._taken_s > self._period_s:
                self._facts = await asyncio.to_thread(scan)
                self._taken_s = time.monotonic()
        return self._facts


def usage_of(facts: Sequence[ProcessFacts], owned_uid: int | None, root: int) -> Usage:
    """Sum over the processes with the given user id; without one, over `root` and its descendants."""
    members = _tree(facts, root)
    if owned_uid is not None:
        members = [entry for entry in facts if entry.uid == owned_uid]
    return Usage(
        pids=tuple(entry.pid for entry in members),
        threads=sum(entry.threads for entry in members),
        resident_bytes=sum(entry.resident_bytes for entry in members),
    )


async def until_over(
    look: Callable[[], Awaitable[Usage]],
    own_threads: int,
    most_threads: int,
    memory_bytes: int,
    disk: Callable[[Sequence[int]], DiskUsage | None],
    allowed: DiskUsage,
) -> Literal["processes", "memory", "disk"]:
    """Wait until a run exceeds a limit as a whole; checks become rarer as the run gets longer.

    Parameters
    ----------
    own_threads
        Threads of the confinement itself, which do not count.
    """
    pause_s = _FIRST_LOOK_S
    while True:
        await asyncio.sleep(pause_s)
        pause_s = min(_LONGEST_LOOK_S, pause_s * 1.5)
        usage = await look()
        if usage.threads - own_threads > most_threads:
            return "processes"
        if usage.resident_bytes > memory_bytes:
            exact_bytes = await asyncio.to_thread(proportional_bytes, usage.pids)
            if (usage.resident_bytes if exact_bytes is None else exact_bytes) > memory_bytes:
                return "memory"
        used = await asyncio.to_thread(disk, usage.pids)
        if used is not None and (used.used_bytes > allowed.used_bytes or used.files > allowed.files):
            return "disk"


def proportional_bytes(pids: Sequence[int]) -> int | None:
    """Resident memory with shared pages counted once over all sharers; None where not readable.

    More expensive than a scan; used only if the plain sum exceeds the limit, as it easily does for forked children
    that share pages with their parent.
    """
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
                lines = [line for line in file if line.startswith("Pss:")]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        except PermissionError:
            return None
        total += sum(int(line.split()[1]) * 1024 for line in lines)
    return total


def scan() -> list[ProcessFacts]:
    """Read /proc once. Ended processes are left out, zombies too."""
    facts = []
    for pid, each in live_processes().items():
        try:
            uid = os.stat(f"/proc/{pid}").st_uid
        except (FileNotFoundError, ProcessLookupError):
            continue
        facts.append(ProcessFacts(pid, each.parent, uid, each.threads, each.resident_pages * _PAGE_BYTES))
    return facts


def _tree(facts: Sequence[ProcessFacts], root: int) -> list[ProcessFacts]:
    children: Mapping[int, list[ProcessFacts]] = defaultdict(list)
    members = []
    for entry in facts:
        children[entry.parent].append(entry)
        if entry.pid == root:
            members.append(entry)
    for entry in members:  # grows while it is read: breadth first
        members.extend(children.get(entry.pid, ()))
    return members
