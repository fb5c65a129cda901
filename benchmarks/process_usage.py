"""What the processes of this one's tree hold and use: memory, open files, shared memory, CPU; by their kind."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from heddle_dask.engines.spec import ENGINE_KINDS, engine_kind

KINDS = ("driver", "scheduler", "rollout", "tool", "engine")
_SHARED_MEMORY = Path("/dev/shm")
# Modules in the command lines of engine servers; their workers are child processes.
_SERVERS = tuple(engine_kind(name).server_module for name in ENGINE_KINDS)


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """One look at the tree.

    Attributes
    ----------
    rss_mib
        Resident memory by kind of process, with the guards of that kind.
    shm_files
        Files in ``/dev/shm`` that belong to this user.
    """

    rss_mib: Mapping[str, float]
    open_files: int
    processes: int
    shm_files: int


def usage() -> ProcessUsage:
    """Look at this process and all its descendants."""
    rss_bytes = dict.fromkeys(KINDS, 0)
    files = processes = 0
    for process, kind in tree():
        with contextlib.suppress(psutil.Error):
            rss_bytes[kind] = rss_bytes.get(kind, 0) + process.memory_info().rss
            files += process.num_fds()
            processes += 1
    rss_mib = {kind: round(held / 2**20, 1) for kind, held in rss_bytes.items()}
    return ProcessUsage(rss_mib, files, processes, _shared_memory_files())


def cpu_by_kind() -> dict[str, float]:
    """CPU seconds that the running processes of the tree have used until now."""
    used_s: dict[str, float] = {}
    for process, kind in tree():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            used_s[kind] = used_s.get(kind, 0.0) + times.user + times.system
    return used_s


def cpu_since(before_s: Mapping[str, float]) -> dict[str, float]:
    """CPU seconds by kind since an earlier `cpu_by_kind`; a process that has ended meanwhile is not counted."""
    return {kind: round(max(0.0, used_s - before_s.get(kind, 0.0)), 2) for kind, used_s in cpu_by_kind().items()}


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """CPU seconds of engine processes, and of scheduler, workers, tools and driver; running processes only."""

    engines_s: float
    control_s: float

    def since(self, before: CpuSeconds) -> CpuSeconds:
        """CPU seconds used since `before`."""
        return CpuSeconds(self.engines_s - before.engines_s, self.control_s - before.control_s)


def cpu_seconds() -> CpuSeconds:
    """CPU seconds used until now."""
    used_s = cpu_by_kind()
    engines_s = used_s.pop("engine", 0.0)
    return CpuSeconds(engines_s, sum(used_s.values()))


def is_server(command: Sequence[str]) -> bool:
    """Whether a command line starts an engine: ``-m`` and its module, not only a mention of it."""
    return any(flag == "-m" and module.startswith(_SERVERS) for flag, module in itertools.pairwise(command))


def tree() -> Iterator[tuple[psutil.Process, str]]:
    """This process and its descendants with their kinds; what a kind starts is of the same kind, but for engines."""
    me = psutil.Process()
    yield me, "driver"
    kinds = {me.pid: "driver"}
    # Parents come before their children.
    for process in me.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            kind = _named_kind(process.cmdline()) or kinds.get(process.ppid(), "driver")
            kinds[process.pid] = kind
            yield process, kind


def victims(kind: str) -> list[psutil.Process]:
    """The programs of a kind that a fault may end: engines, schedulers, and the Dask workers below their nannies."""
    if kind == "scheduler":
        return [p for p, of in tree() if of == kind and "dask scheduler" in " ".join(_command(p)[:4])]
    if kind == "engine":
        return [p for p, of in tree() if of == kind and _is_program(p)]
    nannies = [p for p, of in tree() if of == kind and _command(p)[1:4] == ["-m", "dask", "worker"]]
    return [worker for nanny in nannies for worker in _workers_of(nanny)]


def _is_program(process: psutil.Process) -> bool:
    command = _command(process)
    return command[1:2] == ["-m"] and is_server(command)


def _workers_of(nanny: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [child for child in nanny.children() if "resource_tracker" not in " ".join(_command(child))]
    return []


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


def _named_kind(command: Sequence[str]) -> str | None:
    """The kind that a command line tells; None: that of the parent."""
    if is_server(command):
        return "engine"
    line = " ".join(command)
    if "dask scheduler" in line:
        return "scheduler"
    if "gateway_process" in line:
        return "gateway"
    if "gateway_clients" in line:
        return "agents"
    if "vllm_router" in line:
        return "router"
    names = {name: kind for kind in ("rollout", "tool") for name in command if name.startswith(f"{kind}-")}
    return next(iter(names.values()), None)


def _shared_memory_files() -> int:
    mine = 0
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(_SHARED_MEMORY):
            with contextlib.suppress(FileNotFoundError):
                mine += entry.stat(follow_symlinks=False).st_uid == os.getuid()
    return mine
