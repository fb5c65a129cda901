"""Counts the processes of sandboxed runs and their memory, for limits that the kernel does not enforce.

All runs of an event loop share one scan of /proc, made in a thread if the last scan is older than `period_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
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

    async def tree_usage(self, *roots: int) -> Usage:
        """Usage of these processes and all below them, at most `period_s` old."""
        facts = await self._recent()
        return _sum([entry for root in roots for entry in _tree(facts, root)])

    async def _recent(self) -> Sequence[ProcessFacts]:
        async with self._taking:
            if time.monotonic() - self._taken_s > self._period_s:
                self._facts = await asyncio.to_thread(scan)
                self._taken_s = time.monotonic()
        return self._facts


def usage_of(facts: Sequence[ProcessFacts], owned_uid: int | None, root: int) -> Usage:
    """Sum over the processes with the given user id; without one, over `root` and its descendants."""
    if owned_uid is None:
        return _sum(_tree(facts, root))
    return _sum([entry for entry in facts if entry.uid == owned_uid])


def _sum(members: Sequence[ProcessFacts]) -> Usage:
    return Usage(
        pids=tuple(entry.pid for entry in members),
        threads=sum(entry.threads for entry in members),
        resident_bytes=sum(entry.resident_bytes for entry in members),
    )


@dataclass(frozen=True, slots=True)
class Allowed:
    """What all processes of a sandbox may use together; `disk`: its files, and as many in shared memory."""

    threads: int
    memory_bytes: int
    disk: DiskUsage


class Pace:
    """When to look next: soon after a start, then more rarely; only time in which something runs counts."""

    def __init__(self) -> None:
        self._period_s = _FIRST_LOOK_S
        self._left_s = _FIRST_LOOK_S

    def begin(self) -> None:
        """Something has begun to run."""
        self._period_s = _FIRST_LOOK_S
        self._left_s = min(self._left_s, _FIRST_LOOK_S)

    async def until_due(self) -> None:
        begun_s = time.monotonic()
        try:
            await asyncio.sleep(self._left_s)
        finally:
            self._left_s = max(0.0, self._left_s - (time.monotonic() - begun_s))

    def looked(self) -> None:
        self._period_s = min(_LONGEST_LOOK_S, self._period_s * 1.5)
        self._left_s = self._period_s


async def until_over(
    look: Callable[[], Awaitable[Usage]],
    own_threads: Callable[[], int],
    allowed: Allowed,
    disk: Callable[[Sequence[int]], DiskUsage | None],
    pace: Pace,
) -> Limit:
    """Wait until a sandbox exceeds a limit as a whole.

    Parameters
    ----------
    look
        Usage of all that runs in it.
    own_threads
        Threads of the confinement itself among these, which do not count.
    pace
        Of this sandbox. Where one watch follows another, the second looks when the first would have.
    """
    while True:
        await pace.until_due()
        usage = await look()
        over = await asyncio.to_thread(exceeded, usage, own_threads(), allowed, disk)
        pace.looked()
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
    if sum(each.files for each in shared.values()) > allowed.disk.files:
        return "disk"
    if used is not None and (used.used_bytes > allowed.disk.used_bytes or used.files > allowed.disk.files):
        return "disk"
    return ""


def shared_memory(pids: Sequence[int]) -> dict[int, DiskUsage]:
    """What the private ``/dev/shm`` of these processes hold, by device."""
    return tmpfs_usage(pids, SHARED_MEMORY)


def tmpfs_usage(pids: Sequence[int], place: str) -> dict[int, DiskUsage]:
    """What is in the file systems that these processes see at a place, by device; that of this machine is left out.

    Of a tmpfs, files that are deleted and still open are counted too.
    """
    found: dict[int, DiskUsage] = {}
    own = _device(place)
    for pid in pids:
        inside = f"/proc/{pid}/root{place}"
        device = _device(inside)
        # That of this machine: it is not confined, or not yet. None: it has ended, or may not be looked into.
        if device is not None and device != own and device not in found:
            with contextlib.suppress(OSError):
                tmpfs = os.statvfs(inside)
                used_bytes = (tmpfs.f_blocks - tmpfs.f_bfree) * tmpfs.f_frsize
                found[device] = DiskUsage(used_bytes, tmpfs.f_files - tmpfs.f_ffree)
    return found


def _device(path: str) -> int | None:
    try:
        return os.stat(path).st_dev
    except OSError:
        return None


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
            thread = os.listdir(f"/proc/{pid}/task")[-1]  # the first may have ended before the others
            with open(f"/proc/{pid}/task/{thread}/smaps{'' if left_out else '_rollup'}", "rb") as file:
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
