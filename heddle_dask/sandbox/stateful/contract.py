"""What a stateful sandbox is and does: start, run commands, put and get files, copy, stop.

Its files stay between commands, and so do processes that were declared as services, which are frozen meanwhile. All
other processes end with their command. `docs/sandbox.md` says what each kind promises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any, Literal, Protocol

from heddle_dask.core.errors import BadInput, HeddleError

MIB = 1 << 20
KINDS = ("bubblewrap", "apptainer", "process", "remote")
WORK = "/home/agent"
"""The work directory as commands see it; in the outputs of kinds that cannot mount it there, it is written so."""

WORKERS_GATEWAY = "that of the worker"
GATEWAY_PORT = 8911
"""Of the gateway, on the loopback of a sandbox that has one."""

EndedBy = Literal["", "timeout", "memory", "disk", "processes"]


class SandboxFailed(HeddleError):
    """A sandbox could not be started, or a file operation in it failed; the message is one line."""


class SandboxGone(SandboxFailed):
    """The sandbox is not there any more, or its state is unknown: it can only be rebuilt."""


class ReplayDiffers(HeddleError):
    """A command that was run again to rebuild a sandbox had another output than the first time."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is made from, and its limits.

    Attributes
    ----------
    kind
        One of `KINDS`; empty: the strongest that works on the worker, bubblewrap or process.
    root
        Directory with the read-only root file system, or an image for Apptainer, on the worker; for the kind
        ``remote`` the address of the service; empty: the tools of the worker's machine, and its Python with all
        packages.
    image
        Folder with a root file system, tar of ``docker save``, or OCI layout (folder or tar), on the worker: the
        sandbox writes into a private layer over its files, and has its environment, user and working directory.
    image_digest
        That the image must have; empty: any.
    files
        Written into the work directory at the start, by relative path.
    setup
        Commands that are run once after that. Sandboxes with equal files and setup are copies of one on each worker.
    memory_bytes
        Of all its processes together; its host reserves them for its life.
    disk_bytes, max_files
        Of the work directory and of ``/tmp`` together.
    max_processes
        Concurrent processes and threads.
    output_bytes
        Kept of each output of a command; the middle of a longer one is left out, visibly.
    network
        Whether it may use the worker's network; the kind ``process`` always may.
    gateway
        Path of a Unix socket on the worker, to which ``http://127.0.0.1:8911`` leads in the sandbox: its only network.
        `WORKERS_GATEWAY`: that of the gateway beside the worker; empty: none.
    folders
        Folders of the worker that it can read, at their own paths, such as those with the programs of an agent.
    setup_timeout_s
        Seconds for each command of `setup`.
    """

    kind: str = ""
    root: str = ""
    image: str = ""
    image_digest: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    memory_bytes: int = 512 * MIB
    disk_bytes: int = 256 * MIB
    max_files: int = 20_000
    max_processes: int = 256
    output_bytes: int = 64 * 1024
    network: bool = False
    gateway: str = ""
    folders: tuple[str, ...] = ()
    setup_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.kind not in ("", *KINDS):
            raise BadInput(f"sandbox: kind is {self.kind!r}: use {', '.join(KINDS)}, or nothing")
        if self.image and (self.root or self.kind not in ("", "bubblewrap")):
            raise BadInput(
                "sandbox: an image has a root of its own, and the kind bubblewrap: give neither root nor kind"
            )
        if self.gateway and (self.network or self.kind not in ("", "bubblewrap")):
            raise BadInput(
                "sandbox: a gateway is the only network of a sandbox of the kind bubblewrap: give neither network nor "
                "another kind"
            )
        for folder in self.folders:
            if not PurePosixPath(folder).is_absolute():
                raise BadInput(f"sandbox: the folder {folder!r}: use an absolute path")
        for path in self.files:
            self.checked_path(path)
        for name in ("memory_bytes", "disk_bytes", "max_files", "max_processes", "output_bytes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise BadInput(f"sandbox: {name} is {value!r}: use a whole number above 0")

    def checked_path(self, path: str) -> str:
        """A path of a file as the sandbox takes it: below the work directory, or, with an image, anywhere in it."""
        if not self.image:
            return relative_path(path)
        absolute_path(path, "/")
        return path

    def to_plain(self) -> dict[str, Any]:
        """As plain values."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**plain, "files": dict(self.files), "setup": list(self.setup), "folders": list(self.folders)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> SandboxSpec:
        """The inverse of `to_plain`."""
        return cls(**{**plain, "setup": tuple(plain["setup"]), "folders": tuple(plain["folders"])})


@dataclass(frozen=True, slots=True)
class Command:
    """One command for the shell of a sandbox.

    Attributes
    ----------
    text
        For ``sh -c``; ``{cpus}`` stands for the number of granted CPUs.
    timeout_s
        Seconds, after which all its processes are killed.
    cpus
        Number of granted CPUs, also in its environment (``HEDDLE_CPUS``).
    cores
        CPUs of the machine on which it runs; empty: those of the worker.
    service
        Name of the service that it starts, which lives on; empty: it ends before the next command.
    """

    text: str
    timeout_s: float = 600.0
    cpus: int = 1
    cores: tuple[int, ...] = ()
    service: str = ""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What came of a command.

    Attributes
    ----------
    exit_code
        As in a shell: 128 + n after signal n.
    stdout, stderr
        At most `SandboxSpec.output_bytes` of each; in a longer one, a line says how much is left out.
    seconds
        From the start to the end of its last process.
    ended_by
        The limit that ended it: ``"timeout"``, ``"memory"``, ``"disk"`` or ``"processes"``; empty: it ended by itself.
    """

    exit_code: int
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    ended_by: EndedBy = ""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.ended_by

    @property
    def text(self) -> str:
        """Both outputs for an agent, and what ended the command where that is not exit code 0."""
        parts = [part.rstrip("\n") for part in (self.stdout, self.stderr) if part.strip()]
        if self.ended_by:
            parts.append(f"[stopped: {self.ended_by} limit]")
        elif self.exit_code:
            parts.append(f"[exit code {self.exit_code}]")
        return "\n".join(parts)


class StatefulSandbox(Protocol):
    """One sandbox. Only one call of it runs at a time; cancelling a call ends what it has started."""

    async def start(self) -> None:
        """Make it ready, without its files; must be called first."""

    async def exec(self, command: Command) -> ExecResult:
        """Run a command; whatever it does comes back as a result.

        Raises
        ------
        SandboxFailed
            The sandbox itself is broken.
        """

    async def put(self, path: str, content: bytes) -> None:
        """Write a file below the work directory; folders on the way are made."""

    async def get(self, path: str, most_bytes: int = 16 * MIB) -> bytes:
        """Read a file below the work directory.

        Raises
        ------
        SandboxFailed
            There is no such file, or it is longer than `most_bytes`.
        """

    async def fork(self, name: str) -> StatefulSandbox:
        """A started sandbox with a copy of the files; services are not copied.

        Raises
        ------
        SandboxFailed
            This kind cannot.
        """

    async def stop(self) -> None:
        """End all its processes and delete its files; a second call does nothing."""


def relative_path(path: str) -> str:
    """A path below the work directory, which may be given with it (``/home/agent/a.py``)."""
    pure = PurePosixPath(path)
    if pure.is_absolute() and pure.is_relative_to(WORK):
        pure = pure.relative_to(WORK)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise BadInput(f"sandbox file {path!r}: give a path below the work directory {WORK}")
    return str(pure)


def absolute_path(path: str, folder: str) -> str:
    """A path in an image, which may be given from its working directory."""
    pure = PurePosixPath(folder, path)
    if ".." in pure.parts or not PurePosixPath(path).name or "\0" in path:
        raise BadInput(f"sandbox file {path!r}: give a path in the image, without ..")
    return str(pure)
