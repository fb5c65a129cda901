"""Counts the processes of sandboxed runs and their memory, for limits that the kernel does not enforce.

All runs of an event loop share one scan of /proc, made in a thread if the last scan is older than `period_s`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from heddle_dask.isolation.process_tree import live_processes
from heddle_dask.sandbox.confinement import DiskUsage, PreparedRun
from heddle_dask.sandbox.enclosure import SHARED_MEMORY

Limit = Literal["processes", "memory", "disk"]
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


@dataclass(frozen=True, slots=True)
class Allowed:
    """What all processes of a sandbox may use together; `disk`: its files, those in shared memory too."""

    threads: int
    memory_bytes: int
    disk: DiskUsage


async def until_over(
    look: Callable[[], Awaitable[Usage]],
    own_threads: int,
    allowed: Allowed,
    disk: Callable[[Sequence[int]], DiskUsage | None],
) -> Limit:
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
        over = await asyncio.to_thread(exceeded, usage, own_threads, allowed, disk)
        if over:
            return over


def exceeded(
    usage: Usage, own_threads: int, allowed: Allowed, disk: Callable[[Sequence[int]], DiskUsage | None]
) -> Limit | Literal[""]:
    """The limit that processes exceed; empty: none."""
    if usage.threads - own_threads > allowed.threads:
        return "processes"
    shared = shared_memory(usage.pids)
    shared_bytes = sum(each.used_bytes for each in shared.values())
    most = usage.resident_bytes + shared_bytes
    if most > allowed.memory_bytes:
        exact = proportional_bytes(usage.pids, shared)
        if (most if exact is None else exact + shared_bytes) > allowed.memory_bytes:
            return "memory"
    used = disk(usage.pids)
    files = sum(each.files for each in shared.values()) + (0 if used is None else used.files)
    if files > allowed.disk.files or (used is not None and used.used_bytes > allowed.disk.used_bytes):
        return "disk"
    return ""


def shared_memory(pids: Sequence[int]) -> dict[int, DiskUsage]:
    """What the private ``/dev/shm`` of these processes hold, by device; that of this machine is not theirs."""
    found: dict[int, DiskUsage] = {}
    for pid in pids:
        place = f"/proc/{pid}/root{SHARED_MEMORY}"
        try:
            device = os.stat(place).st_dev
            if device not in found and device != _device_of_this_machine():
                found[device] = tmpfs_usage(place)
        except OSError:  # it has ended, or this process may not look into it
            continue
    return found


def _device_of_this_machine() -> int:
    try:
        return os.stat(SHARED_MEMORY).st_dev
    except OSError:
        return 0


def tmpfs_usage(place: str) -> DiskUsage:
    """Bytes and files of a whole tmpfs, of deleted files that are still open too."""
    tmpfs = os.statvfs(place)
    return DiskUsage((tmpfs.f_blocks - tmpfs.f_bfree) * tmpfs.f_frsize, tmpfs.f_files - tmpfs.f_ffree)


def proportional_bytes(pids: Sequence[int], left_out: Collection[int] = ()) -> int | None:
    """Resident memory with shared pages counted once over all sharers; None where not readable.

    More expensive than a scan; used only if the plain sum exceeds the limit, as it easily does for forked children
    that share pages with their parent.

    Parameters
    ----------
    left_out
        Devices whose mapped files do not count.
    """
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps" if left_out else f"/proc/{pid}/smaps_rollup", "rb") as file:
                total += _proportional(file, left_out)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        except PermissionError:
            return None
    return total


def _proportional(lines: Iterable[bytes], left_out: Collection[int]) -> int:
    total, counts = 0, True
    for line in lines:
        if line.startswith(b"Pss:"):
            total += int(line.split()[1]) * 1024 * counts
        elif line[:1] not in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ":  # the range of a mapping, its rights, offset and device
            major, minor = line.split(None, 4)[3].split(b":")
            counts = os.makedev(int(major, 16), int(minor, 16)) not in left_out
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
