"""What a confinement is: a way to start the inside program behind walls, and to end all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from heddle_dask.sandbox.limits import SandboxLimits

Mode = Literal["bubblewrap", "weak"]


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """One run's place: how to start it and how to be sure that nothing of it is left.

    Attributes
    ----------
    argv, environment, folder
        What to start, with which variables, in which working directory of the host (None: any).
    rlimits
        Limits for the inside program to set, by the names of the `resource` module.
    setuid
        User id that the inside program takes before it runs any code of the agent, None to keep it.
    owned_uid
        A user id that only this run has; processes are counted and killed by it. None: by tree.
    wrapper_processes
        Processes of the confinement itself, which the limit does not count.
    pass_fds
        Open file descriptors that the started program inherits.
    used_disk_bytes
        Measures the private directory where the kernel does not bound it, else None.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str | None
    rlimits: Mapping[str, int]
    setuid: int | None
    owned_uid: int | None
    wrapper_processes: int = 0
    pass_fds: tuple[int, ...] = ()
    used_disk_bytes: Callable[[], int] | None = None


class Confinement(Protocol):
    """A way to confine runs."""

    @property
    def mode(self) -> Mode:
        """Name of the mode, as `docs/sandbox.md` promises things of it."""

    @property
    def isolates_network(self) -> bool:
        """True when code inside reaches no network, loopback of the host included."""

    def prepare(self, limits: SandboxLimits, cpus: int) -> AbstractAsyncContextManager[PreparedRun]:
        """A fresh place for one run; leaving it removes what it owns, on cancellation too."""


def common_rlimits(limits: SandboxLimits) -> dict[str, int]:
    """Resource limits that hold for one process in every mode."""
    return {
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": max(1, int(limits.cpu_s + 0.999)) + 1,
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": 128,
        "RLIMIT_MEMLOCK": 1 << 20,
    }


def common_environment(home: str, cpus: int) -> dict[str, str]:
    """The only variables that the program sees. `cpus` bounds numeric libraries' own threads."""
    return {
        "HOME": home,
        "TMPDIR": home,
        "PATH": "",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": str(cpus),
        # Each further arena reserves 64 MiB of address space, which RLIMIT_AS counts.
        "MALLOC_ARENA_MAX": "1",
    }
