"""Limits of a sandboxed program, as values; the confinement modules enforce them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from heddle_dask.core.errors import BadInput

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one sandboxed run; all must be positive.

    Attributes
    ----------
    wall_s
        Wall-clock seconds, after which the whole process tree is killed.
    cpu_s
        CPU seconds of each process.
    memory_bytes
        Address space of each process, and resident memory of all of them together.
    output_bytes
        Bytes of standard output and standard error together; one more byte kills the run.
    file_bytes
        Maximum size of a file.
    disk_bytes
        Maximum size of the private directory.
    files
        Maximum number of files and folders in the private directory.
    processes
        Maximum number of concurrent processes and threads.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 * MIB
    output_bytes: int = 64 * 1024
    file_bytes: int = 16 * MIB
    disk_bytes: int = 64 * MIB
    files: int = 10_000
    processes: int = 16

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not value > 0:
                raise BadInput(f"sandbox limit {entry.name} = {value!r}: must be greater than 0")
