"""Where a run under a fault takes place: folders, environment and options of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak_faults.agent import ENDED_VARIABLE, SPAN_VARIABLE

MARK_VARIABLE = "HEDDLE_FAULT_MARK"
SHARED_MEMORY = Path("/dev/shm")
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000


@dataclass(slots=True)
class FaultPlace:
    """One run's own place.

    Attributes
    ----------
    prefix
        Words before the command line of the run.
    options
        More options of the run.
    mark
        A word in the environment of all its processes.
    """

    folder: Path
    prefix: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def temporary(self) -> Path:
        """The directory for temporary files."""
        return self.folder / "tmp"

    @property
    def out(self) -> Path:
        """The run."""
        return self.folder / "disk" / "run.zarr"

    @property
    def ended(self) -> int:
        """Trajectories whose programs have ended."""
        return (self.folder / "ended").stat().st_size

    def environment(self, span_s: float) -> dict[str, str]:
        """Of the processes of the run, whose trajectories start over so many seconds."""
        return {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
            MARK_VARIABLE: self.mark,
            ENDED_VARIABLE: str(self.folder / "ended"),
            SPAN_VARIABLE: str(span_s),
            **self.env,
        }

    def marked_processes(self) -> list[str]:
        """Command lines of the processes of this place that run."""
        found = []
        entry = f"{MARK_VARIABLE}={self.mark}".encode()
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if process.name.isdigit() and entry in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:160])
        return found

    def left_files(self) -> list[str]:
        """What is in the directory for temporary files and in the shared memory; an empty shared folder is kept."""
        kept = {f"heddle-{of}-{os.getuid()}" for of in ("engines", "cores", "sandboxes")}
        found = [path for path in self.temporary.iterdir() if path.name not in kept]
        found += self.temporary.glob("heddle-sandboxes-*/*")
        found += self.temporary.glob("heddle-engines-*/*")
        return [str(path) for path in (*found, *SHARED_MEMORY.iterdir())]


def shell(*words: str | Path) -> None:
    """Run a command of the machine.

    Raises
    ------
    RuntimeError
        It failed; in one line.
    """
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")


def take_own_namespaces() -> None:
    """Give this process mounts, network and shared memory of its own, which end with it.

    Raises
    ------
    OSError
        It may not (it is not root).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    shell("mount", "--make-rprivate", "/")
    for path in (SHARED_MEMORY, Path("/run")):
        shell("mount", "-t", "tmpfs", "none", path)
    shell("ip", "link", "set", "lo", "up")


@contextlib.contextmanager
def new_place() -> Iterator[FaultPlace]:
    """A folder on the disk, which is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="heddle-fault-", dir="/var/tmp"))
    place = FaultPlace(folder)
    try:
        place.temporary.mkdir()
        place.out.parent.mkdir()
        (folder / "ended").touch()
        yield place
    finally:
        for mounted in (place.temporary, place.out.parent):
            while os.path.ismount(mounted):
                shell("umount", "-l", mounted)
        shutil.rmtree(folder)


def rollout_command(place: FaultPlace, trajectories: int, program: str, *more: str) -> list[str]:
    """The command line of a run."""
    sizes = ["--tasks", str(trajectories), "--samples", "1", "--max-steps", "8", "--max-context-tokens", "2048"]
    engines = ["--engine", "emulated", "--sandbox", "weak", "--no-dashboard"]
    env = ["--env", f"benchmarks.soak_faults.agent:{program}"]
    heddle = [sys.executable, "-c", "from heddle_dask.cli.main import main; main()"]
    options = [*env, *sizes, *engines, "--json", "--out", str(place.out), *place.options, *more]
    return [*place.prefix, *heddle, "rollout", *options]
