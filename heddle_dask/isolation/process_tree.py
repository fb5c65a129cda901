"""Processes below a process: found, counted, and killed until none is left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_S = 10.0
_PAUSE_S = 0.001
_ROUNDS_TO_STOP = 100


class ProcessStat(NamedTuple):
    """What /proc says of a process: state letter, parent, session, threads, start (clock ticks), resident pages."""

    state: str
    parent: int
    session: int
    threads: int
    started: int
    resident_pages: int

    @property
    def alive(self) -> bool:
        """Whether any of its threads lives: the first, whose state this is, may have ended before the others."""
        return self.state not in "ZX" or self.threads > 1


def stat_of(pid: int) -> ProcessStat | None:
    found = _stat(f"/proc/{pid}/stat")
    if found is None or found.state not in "ZX" or found.threads == 1:
        return found
    # Its first thread has ended, and has no memory any longer: another one has.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for name in os.listdir(f"/proc/{pid}/task"):
            other = _stat(f"/proc/{pid}/task/{name}/stat")
            if other is not None and other.state not in "ZX":
                return found._replace(resident_pages=other.resident_pages)
    return found


def _stat(path: str) -> ProcessStat | None:
    try:
        with open(path, "rb") as file:
            # The name, in parentheses, may hold spaces and parentheses itself.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return ProcessStat(
        fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[17]), int(fields[19]), int(fields[21])
    )


def start_of(pid: int) -> int:
    """Start time of a live process in clock ticks since boot; 0 without one. A pid alone is used again."""
    found = stat_of(pid)
    return 0 if found is None or not found.alive else found.started


def live_processes() -> dict[int, ProcessStat]:
    """All processes of this machine, without those that have ended."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            each = stat_of(int(name))
            if each is not None and each.alive:
                found[int(name)] = each
    return found


def below(root: int, processes: dict[int, ProcessStat] | None = None) -> list[int]:
    """The live processes that descend from `root`, without itself."""
    living = live_processes() if processes is None else processes
    children: dict[int, list[int]] = defaultdict(list)
    for pid, each in living.items():
        children[each.parent].append(pid)
    found = list(children[root])
    for pid in found:  # grows while it is read
        found += children[pid]
    return found


def become_subreaper() -> None:
    """Processes below this one stay below it when their parent ends, so that they can be found."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def own_children() -> list[int]:
    """The children of this process, ended ones that are not reaped too."""
    try:
        lists = [path.read_text(encoding="ascii") for path in Path("/proc/self/task").glob("*/children")]
    except OSError:
        lists = []
    if lists:
        return [int(pid) for text in lists for pid in text.split()]
    own = os.getpid()  # a kernel without these files
    found = ((int(name), stat_of(int(name))) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid, each in found if each is not None and each.parent == own]


def has_children() -> bool:
    """Whether this process has a child, an ended one that is not reaped too. One system call."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def end_children(spared: Collection[int] = ()) -> bool:
    """Kill and reap what is below this process, a subreaper, until nothing is left; whether any of it was alive.

    All of it is stopped before it is killed: what forks without end would otherwise fill the places of the killed.

    Parameters
    ----------
    spared
        Children that stay, with all below them.
    """
    found = False
    own = os.getpid()
    deadline_s = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline_s:
        targets = _stopped_below(own, spared)
        kill_all(targets)
        children = [pid for pid in own_children() if pid not in spared]
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        found = found or bool(targets)
        if not children:
            break
        if targets:
            time.sleep(_PAUSE_S)
    return found


def _stopped_below(root: int, spared: Collection[int]) -> list[int]:
    """Stop what is below `root` but for the spared, until nothing new is there; returns the pids."""
    stopped: dict[int, None] = {}
    for _ in range(_ROUNDS_TO_STOP):
        living = {pid: each for pid, each in live_processes().items() if pid not in spared}
        going = [pid for pid in below(root, living) if pid not in stopped]
        if not going:
            break
        for pid in going:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
            stopped[pid] = None
    return list(stopped)


def kill_sessions(leaders: Collection[int]) -> None:
    """Kill the processes of these sessions, until none is left or ten seconds have passed."""
    deadline_s = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline_s:
        members = [pid for pid, each in live_processes().items() if each.session in leaders]
        if not members:
            return
        kill_all(members)
        time.sleep(_PAUSE_S)


def kill_all(pids: Iterable[int]) -> None:
    """SIGKILL to each of these processes that is there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
