"""Limits of a sandboxed program, and the result of its run: a text for the agent, with a named cause of a failure.

The confinement modules enforce the limits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from heddle_dask.core.errors import BadInput
from heddle_dask.sandbox.inside import EXIT_FILES, EXIT_MEMORY, EXIT_PROCESSES

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


Cause = Literal["", "error", "timeout", "memory", "output", "processes", "files"]

_SIGXCPU = 24


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """Result of a tool for the agent.

    Attributes
    ----------
    text
        Output of the program; after a failure the last line gives the reason.
    ok
        True if the program ended by itself with exit status 0.
    cause
        ``""`` if ok; ``"error"``: exception or exit status; else the limit that ended it.
    seconds
        Wall-clock seconds from start to the end of the last process.
    """

    text: str
    ok: bool
    cause: Cause
    seconds: float


@dataclass(frozen=True, slots=True)
class RawRun:
    """Result of a run from the operating system.

    Attributes
    ----------
    output
        Bytes written, at most `SandboxLimits.output_bytes`.
    exit_status
        As in a shell: 128 + n after signal n.
    stopped_for
        The limit for which it was killed; ``""`` if it ended by itself.
    """

    output: bytes
    exit_status: int
    stopped_for: Cause
    seconds: float


def judge(run: RawRun, limits: SandboxLimits) -> ToolOutput:
    """Make the result for the agent from a raw run."""
    cause, sentence = _cause_and_sentence(run, limits)
    text = run.output.decode("utf-8", errors="replace")
    if sentence:
        text = text + ("\n" if text and not text.endswith("\n") else "") + f"[{sentence}]"
    return ToolOutput(text, ok=cause == "", cause=cause, seconds=run.seconds)


def _cause_and_sentence(run: RawRun, limits: SandboxLimits) -> tuple[Cause, str]:
    stopped: dict[Cause, str] = {
        "timeout": f"stopped: ran longer than {limits.wall_s:g} s",
        "memory": f"stopped: used more than {limits.memory_bytes / MIB:g} MiB of memory",
        "output": f"stopped: wrote more than {limits.output_bytes} bytes of output",
        "processes": f"stopped: started more than {limits.processes} processes and threads",
        "files": f"stopped: wrote more than {limits.disk_bytes / MIB:g} MiB or {limits.files} files",
    }
    if run.stopped_for:
        return run.stopped_for, stopped[run.stopped_for]
    status = run.exit_status
    if status == 0:
        return "", ""
    if status == EXIT_MEMORY:
        return "memory", f"failed: memory limit of {limits.memory_bytes / MIB:g} MiB"
    if status == EXIT_PROCESSES:
        return "processes", "failed: no more processes and threads allowed"
    if status == EXIT_FILES:
        per_file, in_all = limits.file_bytes / MIB, limits.disk_bytes / MIB
        return "files", f"failed: limit of {per_file:g} MiB per file and {in_all:g} MiB in all"
    if status == 128 + _SIGXCPU:
        return "timeout", f"stopped: used more than {limits.cpu_s:g} s of CPU time"
    if status > 128:
        return "error", f"failed: killed by signal {status - 128}"
    return "error", f"failed: exit status {status}"
