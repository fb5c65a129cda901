"""The kinds of sandboxes on a machine: how each starts a command with the sandbox's files and nothing else."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from heddle_dask.core.errors import HeddleError
from heddle_dask.isolation.granted import cpu_variables
from heddle_dask.sandbox.confinement import PreparedRun, common_rlimits, compiled
from heddle_dask.sandbox.enclosure import Inside, enclosed
from heddle_dask.sandbox.stateful import own_network
from heddle_dask.sandbox.stateful.contract import GATEWAY_PORT, WORK, Command, SandboxSpec
from heddle_dask.sandbox.stateful.work_directory import WorkDirectory
from heddle_dask.sandbox.system_calls import filter_program

_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
# Of /etc, what tools need to run: no settings or accounts of the machine.
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "localtime", "ssl/certs", "mime.types")


class SandboxKind(Protocol):
    """A way to run commands on the files of a sandbox."""

    @property
    def name(self) -> str:
        """One of `contract.KINDS`."""

    @property
    def private_user(self) -> bool:
        """Whether each sandbox has a user id of its own."""

    def prepare(self, command: Command, files: WorkDirectory, spec: SandboxSpec) -> AbstractContextManager[PreparedRun]:
        """How to start a command, once, before the context is left."""


def limits_of(spec: SandboxSpec, own_processes: int, *, own_user: bool = True) -> dict[str, int]:
    """Resource limits of a command.

    Parameters
    ----------
    own_user
        Whether its user has no other processes, which would count: else `shell_of` sets that limit in a namespace.
    """
    limits = common_rlimits(
        memory_bytes=max(spec.memory_bytes, 1 << 28),
        file_bytes=spec.disk_bytes,
        processes=spec.max_processes + own_processes,
        open_files=1024,
    )
    # Agents are programs of JavaScript often, which reserve a hundred times the addresses that they use.
    left_out = {*(() if own_user else ("RLIMIT_NPROC",)), *(("RLIMIT_AS",) if spec.gateway else ())}
    return {name: value for name, value in limits.items() if name not in left_out}


def behind_gateway(spec: SandboxSpec, argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command, with a network of its own where the sandbox has a gateway."""
    if not spec.gateway:
        return argv
    python = getattr(sys, "_base_executable", sys.executable)
    return (python, "-I", "-S", "-B", "-c", compiled(own_network.source()), str(GATEWAY_PORT), *argv)


def folders_of(spec: SandboxSpec) -> tuple[str, ...]:
    """Arguments of bubblewrap for the folders of the worker that the sandbox can read."""
    for folder in spec.folders:
        if not os.path.isdir(folder):
            raise HeddleError(f"sandbox: no folder {folder} on this worker")
    return tuple(_binds(spec.folders))


def environment_of(command: Command, home: str, path: str) -> dict[str, str]:
    return {
        "HOME": home,
        "TMPDIR": "/tmp",
        "PATH": path,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "USER": "agent",
        # Two runs of one command are to print the same (`docs/sandbox.md`, replay).
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "GIT_CONFIG_NOSYSTEM": "1",
        "MALLOC_ARENA_MAX": "2",
        **cpu_variables(command.cpus),
    }


def shell_of(command: Command, most_processes: int = 0) -> tuple[str, ...]:
    """The command, with a limit of processes in its user namespace: shells call it ``-p`` or ``-u``."""
    limit = f"ulimit -p {most_processes} 2>/dev/null || ulimit -u {most_processes}; " if most_processes else ""
    return ("/bin/sh", "-c", limit + command.text.replace("{cpus}", str(max(1, command.cpus))))


def _python_prefixes() -> list[str]:
    """The folders of this Python and of the virtual environment around it, outside of the system's."""
    prefixes = [os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix)]
    return [p for p in dict.fromkeys(prefixes) if p not in ("/", "/usr") and not p.startswith("/usr/")]


class BubblewrapKind:
    """Namespaces by bubblewrap: the root is read-only, and nothing else of the host is there."""

    name = "bubblewrap"

    def __init__(self, program: str, setpriv: str | None) -> None:
        self.program = program
        self._setpriv = setpriv
        self.private_user = os.geteuid() == 0
        self._host_root = tuple(_host_root())
        # A Python below /tmp, such as a virtual environment in a checkout there, comes after the sandbox's own /tmp.
        self._below_tmp = tuple(_binds(prefix for prefix in _python_prefixes() if _is_below_tmp(prefix)))

    @contextmanager
    def prepare(self, command: Command, files: WorkDirectory, spec: SandboxSpec) -> Iterator[PreparedRun]:
        path = [f"{prefix}/bin" for prefix in reversed(_python_prefixes())] if not spec.root else []
        found = Inside(
            root=("--ro-bind", spec.root, "/") if spec.root else (*self._host_root, *_accounts(files)),
            writable=("--bind", str(files.tmp), "/tmp", "--bind", str(files.work), WORK)
            + (() if spec.root else self._below_tmp)
            + folders_of(spec),
            folder=WORK,
            command=(*_as_user(self._setpriv, files), *shell_of(command, 0 if files.uid else spec.max_processes + 4)),
            shared_memory_bytes=spec.memory_bytes // 2,
            network=spec.network or bool(spec.gateway),
        )
        with enclosed(self.program, found, user_namespace=not self.private_user) as made:
            yield PreparedRun(
                argv=behind_gateway(spec, made.argv),
                gateway=spec.gateway,
                environment=environment_of(command, WORK, ":".join([*path, _SYSTEM_PATH])),
                rlimits=limits_of(spec, 2, own_user=self.private_user),
                wrapper_processes=2,
                pass_fds=made.pass_fds,
            )


def _accounts(files: WorkDirectory) -> Iterator[str]:
    for name in ("passwd", "group"):
        yield from ("--ro-bind", str(files.path / name), f"/etc/{name}")
    yield from ("--dir", "/home")


def _as_user(setpriv: str | None, files: WorkDirectory) -> tuple[str, ...]:
    """What a command begins with where its sandbox has a user of its own."""
    if files.uid is None:
        return ()
    assert setpriv is not None
    return (
        setpriv,
        "--reuid",
        str(files.uid),
        "--regid",
        str(files.uid),
        "--clear-groups",
        "--no-new-privs",
        "--inh-caps=-all",
    )


def _host_root() -> Iterator[str]:
    """The machine's tools, read-only, at their own paths: folders of the system, this Python, and a little of /etc."""
    for folder in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt"):
        if os.path.islink(folder):
            yield from ("--symlink", os.readlink(folder), folder)
        elif os.path.isdir(folder):
            yield from ("--ro-bind", folder, folder)
    yield from _binds(prefix for prefix in _python_prefixes() if not _is_below_tmp(prefix))
    yield from ("--dir", "/etc", "--dir", "/etc/ssl")
    for name in _ETC:
        if os.path.exists(f"/etc/{name}"):
            yield from ("--ro-bind", f"/etc/{name}", f"/etc/{name}")


def _binds(folders: Iterable[str]) -> Iterator[str]:
    """Bind folders read-only. Those that bubblewrap makes on the way would not be open to other users."""
    bound = list(folders)
    for parent in sorted({str(p) for folder in bound for p in Path(folder).parents} - {"/", "/tmp"}):
        yield from ("--dir", parent)
    for folder in bound:
        yield from ("--ro-bind", folder, folder)


def _is_below_tmp(path: str) -> bool:
    return path.startswith("/tmp/")


class ApptainerKind:
    """Containers by Apptainer: the root is an image or a directory, without any privilege.

    Parameters
    ----------
    program
        Path of ``apptainer`` or ``singularity``.
    """

    name = "apptainer"
    private_user = False

    def __init__(self, program: str) -> None:
        self._program = program

    @contextmanager
    def prepare(self, command: Command, files: WorkDirectory, spec: SandboxSpec) -> Iterator[PreparedRun]:
        if not spec.root:
            raise HeddleError("sandbox: the kind apptainer needs root=IMAGE, a .sif file or a directory")
        arguments = [self._program, "exec", "--containall", "--cleanenv", "--no-home", "--no-privs"]
        arguments += ["--userns", "--pid", "--ipc", "--uts"]
        if not spec.network:
            arguments += ["--net", "--network", "none"]
        arguments += ["--bind", f"{files.work}:{WORK}", "--bind", f"{files.tmp}:/tmp", "--pwd", WORK]
        inside = environment_of(command, WORK, _SYSTEM_PATH)
        for name, value in sorted(inside.items()):
            if name != "HOME":  # Apptainer sets it by itself, and warns about it
                arguments += ["--env", f"{name}={value}"]
        for folder in spec.folders:
            arguments += ["--bind", f"{folder}:{folder}:ro"]
        yield PreparedRun(
            argv=(*arguments, spec.root, *shell_of(command, spec.max_processes + 5)),
            environment={"PATH": _SYSTEM_PATH + ":/usr/sbin:/sbin", "HOME": str(files.tmp)},
            rlimits=limits_of(spec, 3, own_user=False),
            wrapper_processes=3,
        )


class ProcessKind:
    """Plain processes with limits: for commands that you would run yourself. See ``docs/sandbox.md``."""

    name = "process"

    def __init__(self, setpriv: str | None) -> None:
        self._setpriv = setpriv
        self.private_user = os.geteuid() == 0

    @contextmanager
    def prepare(self, command: Command, files: WorkDirectory, spec: SandboxSpec) -> Iterator[PreparedRun]:
        if spec.gateway:
            raise HeddleError("sandbox: a gateway needs a network namespace: install the package bubblewrap")
        if spec.root or spec.image:
            raise HeddleError("sandbox: the kind process has no root of its own: use bubblewrap or apptainer")
        path = [f"{prefix}/bin" for prefix in reversed(_python_prefixes()) if _open_to(prefix, files)]
        environment: Mapping[str, str] = {
            **environment_of(command, str(files.work), ":".join([*path, _SYSTEM_PATH])),
            "TMPDIR": str(files.tmp),
        }
        yield PreparedRun(
            argv=(*_as_user(self._setpriv, files), *shell_of(command)),
            environment=environment,
            folder=str(files.work),
            rlimits=limits_of(spec, 0, own_user=self.private_user),
            calls_filter=filter_program(),
        )


def _open_to(prefix: str, files: WorkDirectory) -> bool:
    """Whether the sandbox's user can use programs below this folder."""
    return files.uid is None or all(p.stat().st_mode & 0o001 for p in (Path(prefix), *Path(prefix).parents))


def kind_named(name: str) -> SandboxKind:
    """The kind of that name; of no name, the strongest of bubblewrap and process.

    Whether it works is seen when a sandbox starts (`local_sandbox.LocalSandbox.start`).
    """
    setpriv = shutil.which("setpriv")
    if os.geteuid() == 0 and setpriv is None and name != "apptainer":
        raise HeddleError("sandbox: as root it needs the program setpriv: install the package util-linux")
    if name in ("", "bubblewrap"):
        bwrap = shutil.which("bwrap")
        if bwrap is not None:
            return BubblewrapKind(bwrap, setpriv)
        if name:
            raise HeddleError("sandbox: no bwrap on this machine: install the package bubblewrap")
    if name == "apptainer":
        program = shutil.which("apptainer") or shutil.which("singularity")
        if program is None:
            raise HeddleError("sandbox: no apptainer on this machine: install the package apptainer")
        return ApptainerKind(program)
    return ProcessKind(setpriv)
