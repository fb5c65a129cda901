"""The Python inside the sandbox, and the files of the host that it needs."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

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
        for source, inside in self.binds:
            for pattern in ("*-packages", "python*/*-packages"):
                found = (
                    path for path in Path(source).glob(pattern) if path.name in _PACKAGES and path.is_dir()
                )
                places += [str(Path(inside, path.relative_to(source))) for path in found]
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
