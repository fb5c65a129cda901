"""The interface of a confinement: it starts the inside program with limits, and ends all its processes."""

from __future__ import annotations

import functools
import marshal
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from heddle_dask.isolation.granted import cpu_variables
from heddle_dask.sandbox.outcome import SandboxLimits

Mode = Literal["bubblewrap", "weak"]


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Bytes on disk in the private directory, and the number of its files and folders."""

    used_bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """One prepared run: how to start it, and how to find all its processes.

    Attributes
    ----------
    argv, environment, folder
        Command line, environment variables, and working directory on the host.
    rlimits
        Limits by the names of the `resource` module, set before any code of the agent runs.
    setuid
        User id to which the inside program changes before it runs any code of the agent; None to keep it.
    owned_uid
        A user id of this run alone, by which its processes are counted and killed; None: by process tree.
    wrapper_processes
        Number of processes of the confinement itself, which do not count towards the limit.
    pass_fds
        Open file descriptors that the started program inherits.
    calls_filter
        Filter of system calls that is set before any code of the agent runs; empty: the confinement sets it.
    gateway
        Unix socket of a gateway, if the command begins with what makes a network for it (`own_network`).
    disk_usage
        Measures the private directory as the given processes inside see it; None where that is not possible.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str = "/"
    rlimits: Mapping[str, int] = field(default_factory=dict)
    setuid: int | None = None
    owned_uid: int | None = None
    wrapper_processes: int = 0
    pass_fds: tuple[int, ...] = ()
    calls_filter: bytes = b""
    gateway: str = ""
    disk_usage: Callable[[Sequence[int]], DiskUsage | None] = lambda pids: None


class Confinement(Protocol):
    """A way to confine runs."""

    @property
    def mode(self) -> Mode:
        """Name of the mode in `docs/sandbox.md`."""

    @property
    def isolates_network(self) -> bool:
        """True if code inside has no network, not even the host's loopback."""

    def prepare(self, limits: SandboxLimits, cpus: int) -> AbstractAsyncContextManager[PreparedRun]:
        """Prepare one run; leaving the context removes its resources, also on cancellation."""


def common_rlimits(*, memory_bytes: int, file_bytes: int, processes: int, open_files: int) -> dict[str, int]:
    """Resource limits of one process in every sandbox."""
    return {
        "RLIMIT_CORE": 0,
        "RLIMIT_AS": memory_bytes,
        "RLIMIT_FSIZE": file_bytes,
        # Above the limit, so that the watch sees that it is exceeded.
        "RLIMIT_NPROC": processes + 2,
        "RLIMIT_NOFILE": open_files,
        "RLIMIT_MEMLOCK": 1 << 20,
    }


def rlimits_of(limits: SandboxLimits) -> dict[str, int]:
    """Resource limits of one run of Python code."""
    common = common_rlimits(
        memory_bytes=limits.memory_bytes, file_bytes=limits.file_bytes, processes=limits.processes, open_files=128
    )
    return {**common, "RLIMIT_CPU": max(1, int(limits.cpu_s + 0.999)) + 1}


def common_environment(home: str, cpus: int) -> dict[str, str]:
    """All environment variables of the program. `cpus` is in ``HEDDLE_CPUS``, and limits numeric libraries."""
    return {
        "HOME": home,
        "TMPDIR": home,
        "PATH": "",
        "LANG": "C.UTF-8",
        **cpu_variables(cpus),
        # Each additional arena reserves 64 MiB of address space, which RLIMIT_AS counts.
        "MALLOC_ARENA_MAX": "1",
    }


# Private user ids of sandboxed runs, by which the kernel can count and limit their processes.
#
# RLIMIT_NPROC counts per user and does not apply to root. As root, each run therefore gets its own user id, far above
# those that a system assigns.


_FIRST = 1 << 31
_COUNT = (1 << 31) - 1  # the last id, 2^32 - 1, means "no user"


def private_user_id() -> int:
    """A random user id that no other run on this machine has, with high probability.

    It is drawn from all ids, because dead processes of a run count for its id until init has reaped them, and workers
    in other containers of the machine draw from the same ids; with a small range such collisions have occurred. With
    a thousand concurrent runs, the probability of a collision is one in four thousand.
    """
    return _FIRST + secrets.randbelow(_COUNT)


@functools.cache
def compiled(source: str) -> str:
    """A program for ``-c`` of a Python of this version, which saves the millisecond that compiling it takes."""
    return f"import marshal; exec(marshal.loads({marshal.dumps(compile(source, '<sandbox>', 'exec'))!r}))"
