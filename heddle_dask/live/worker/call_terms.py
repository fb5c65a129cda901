"""The terms under which a process runs one call: it sets them before the call, and takes them back after."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from heddle_dask.isolation.granted import yield_cpus

# Above the limit of an action's memory: the stack of each thread, and what the libraries of this process reserve.
_DATA_BYTES_PER_CPU = 16 << 20
_DATA_BYTES_OF_LIBRARIES = 64 << 20
_FULL = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class CallTerms:
    cpus: int = 1  # number of CPUs of the call
    cores: tuple[int, ...] = ()  # cores on which all its threads run; empty: those that they have
    variables: Mapping[str, str] = field(default_factory=dict)  # environment variables
    # Limit of what it allocates from now on; 0: none. Such a process is not used again.
    memory_bytes: int = 0
    file_bytes: int = 0  # limit of a file that it writes; 0: none
    user_threads: int = 0  # limit of all processes and threads of this user; 0: none
    # Not 0: some of the cores are lent, and those that have them go first. Such a process is not used for other calls.
    nice: int = 0

    def apply(self) -> None:
        """Set them for this process."""
        os.environ.update(self.variables)
        tempfile.tempdir = None  # remembered from the call before; `TMPDIR` says where now
        if self.cores:
            pin_threads(self.cores)
        if self.nice:
            yield_cpus(os.getpid(), self.nice)
        _lower(resource.RLIMIT_FSIZE, self.file_bytes)
        _lower(resource.RLIMIT_NPROC, self.user_threads)
        if self.memory_bytes:
            reserve_bytes = _DATA_BYTES_OF_LIBRARIES + self.cpus * _DATA_BYTES_PER_CPU
            _lower(resource.RLIMIT_DATA, _data_bytes() + self.memory_bytes + reserve_bytes)

    def take_back(self, cores: Collection[int]) -> None:
        """Undo what `apply` did, as far as the next call does not set it; `cores` are those of an idle process."""
        lift_limits()
        if self.cores:
            pin_threads(cores)

    def cause_of(self, error: BaseException) -> str:
        """The limit behind an exception of the call; empty: none of these."""
        number = getattr(error, "errno", None)
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and number == errno.ENOMEM):
            return "memory" if self.memory_bytes else ""
        if isinstance(error, OSError) and number in _FULL:
            return "disk"
        refused = isinstance(error, BlockingIOError) and number == errno.EAGAIN
        if self.user_threads and (refused or "start new thread" in str(error)):
            return "processes"
        return ""


def lift_limits() -> None:
    """The limits of this process are what its user has again: there must be memory to report an error."""
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_DATA):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (hard, hard))


def pin_threads(cores: Collection[int]) -> None:
    """Let every thread of this process run on these cores alone; what they start inherits it."""
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(name), cores)


def _lower(kind: int, value: int) -> None:
    """Set the soft limit alone: an unprivileged process cannot raise a hard one again."""
    if not value:
        return
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _data_bytes() -> int:
    """What this process has allocated, as RLIMIT_DATA counts it."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData:"))
