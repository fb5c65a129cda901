"""The strong mode: namespaces by bubblewrap (`bwrap`); `docs/sandbox.md` has its guarantees.

The private directory is a tmpfs of bounded size inside the sandbox's own mount namespace: it disappears with the last
process, even if this process is killed with SIGKILL, and never exists on the host. The Python inside needs some files
of the host (`Interpreter`).
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from heddle_dask.sandbox import inside
from heddle_dask.sandbox.confinement import (
    DiskUsage,
    Mode,
    PreparedRun,
    common_environment,
    compiled,
    private_user_id,
    rlimits_of,
)
from heddle_dask.sandbox.enclosure import Inside, enclosed
from heddle_dask.sandbox.outcome import SandboxLimits
from heddle_dask.sandbox.process_accounting import tmpfs_usage

_PACKAGES = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter with the read-only files that it needs.

    Attributes
    ----------
    program
        Real path of the executable on the host.
    program_inside
        Path of the executable inside, with only `binds` mounted.
    binds
        Pairs of a host path and the path inside.
    libraries_inside
        Folder for ``LD_LIBRARY_PATH`` inside; ``""`` if the system's folders suffice.
    """

    program: str
    program_inside: str
    binds: tuple[tuple[str, str], ...]
    libraries_inside: str

    @classmethod
    def of_this_process(cls) -> Interpreter:
        """The interpreter under the current virtual environment (`sys.base_prefix`)."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        prefix = Path(os.path.realpath(sys.base_prefix))
        program = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
        if prefix in (Path("/usr"), Path("/")):
            # A system Python: mount the executable and its library, not all of /usr.
            library = sysconfig.get_path("stdlib", vars={"installed_base": "/usr"})
            return cls(
                program=str(program),
                program_inside=str(program),
                binds=((str(program), str(program)), (library, library)),
                libraries_inside="",
            )
        # Mount any other Python at a neutral path: its host path would reveal the user.
        inside = f"/python/bin/{version}"
        return cls(
            program=str(program),
            program_inside=inside,
            binds=((str(program), inside), (str(prefix / "lib"), "/python/lib")),
            libraries_inside="/python/lib",
        )

    @property
    def hidden_inside(self) -> tuple[str, ...]:
        """Folders of installed packages below `binds`, by their path inside: they belong to the host."""
        places = []
        for source, target in self.binds:
            for pattern in ("*-packages", "python*/*-packages"):
                found = (path for path in Path(source).glob(pattern) if path.name in _PACKAGES and path.is_dir())
                places += [str(Path(target, path.relative_to(source))) for path in found]
        return tuple(places)

    @property
    def open_to_all(self) -> bool:
        """True if an unprivileged user can execute the interpreter on the host."""
        parents = Path(self.program).parents
        return all(parent.stat().st_mode & 0o001 for parent in parents)


def system_library_folders() -> tuple[str, ...]:
    """The existing folders with the C library and the libraries of extension modules."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    candidates = (f"/usr/lib/{multiarch}" if multiarch else "", "/usr/lib64", "/lib64")
    # Links (merged /usr) are left out: the confinement creates them as links inside.
    return tuple(f for f in candidates if f and Path(f).is_dir() and not Path(f).is_symlink())


class Bubblewrap:
    """Runs behind bubblewrap.

    Parameters
    ----------
    private_user_ids
        True (needs root): no user namespace; each run has its own user id, so that the kernel limits its processes.
        False: a user namespace, in which the kernel counts per namespace (Linux 5.14 and later) unless the invoking
        user is root.
    """

    mode: Mode = "bubblewrap"
    isolates_network = True

    def __init__(self, program: str, *, private_user_ids: bool) -> None:
        interpreter = Interpreter.of_this_process()
        self._program = program
        self._root = tuple(_root(interpreter))
        self._command = (interpreter.program_inside, "-I", "-S", "-B", "-c", compiled(inside.source()))
        self._libraries = interpreter.libraries_inside
        self._private_user_ids = private_user_ids

    @asynccontextmanager
    async def prepare(self, limits: SandboxLimits, cpus: int) -> AsyncIterator[PreparedRun]:
        environment = common_environment("/tmp", cpus)
        if self._libraries:
            environment["LD_LIBRARY_PATH"] = self._libraries
        found = Inside(
            root=self._root,
            writable=("--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", "/tmp"),
            folder="/tmp",
            command=self._command,
            shared_memory_bytes=limits.memory_bytes // 2,
            processes_shown=False,
        )
        with enclosed(self._program, found, user_namespace=not self._private_user_ids) as made:
            yield PreparedRun(
                argv=made.argv,
                environment=environment,
                rlimits=rlimits_of(limits),
                setuid=private_user_id() if self._private_user_ids else None,
                wrapper_processes=2,
                pass_fds=made.pass_fds,
                disk_usage=_disk_usage,
            )


def _disk_usage(pids: Sequence[int]) -> DiskUsage | None:
    """Usage of the tmpfs that the processes inside see. `bwrap` can limit its bytes, not its number of files."""
    return max(tmpfs_usage(pids, "/tmp").values(), key=lambda usage: usage.files, default=None)


def _root(interpreter: Interpreter) -> Iterator[str]:
    """The interpreter, its libraries and those of the system, read-only; folders of installed packages are empty."""
    binds = [*interpreter.binds, *((f, f) for f in system_library_folders())]
    # Create the parents explicitly: folders that bubblewrap creates implicitly are not accessible to other users.
    for parent in sorted({str(parent) for _, place in binds for parent in Path(place).parents} - {"/"}):
        yield from ("--dir", parent)
    for source, place in binds:
        yield from ("--ro-bind", source, place)
    for place in interpreter.hidden_inside:
        yield from ("--tmpfs", place, "--remount-ro", place)
    for link in ("/lib", "/lib64"):
        if os.path.islink(link):
            yield from ("--symlink", os.readlink(link), link)
