"""The faults of a machine's files, clock and limits, each with what brings it on and what ends it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar

from benchmarks.process_usage import victims
from benchmarks.soak_faults.place import FaultPlace, shell

MIB = 1 << 20


class Fault:
    """One fault; this one is none.

    Attributes
    ----------
    told
        What happens, for the table.
    after
        Share of the trajectories that have ended when it comes.
    lasts_s
        Seconds until it ends; None: after the run has ended.
    """

    told: str = "none"
    program: ClassVar[str] = "solve"
    trajectories: ClassVar[int] = 200
    span_s: ClassVar[float] = 15.0
    after: ClassVar[float] = 0.3
    lasts_s: ClassVar[float | None] = None

    @contextlib.contextmanager
    def around(self, place: FaultPlace) -> Iterator[None]:
        """What is there before, during and after the run."""
        yield

    def strike(self, place: FaultPlace) -> None:
        """Bring the fault on."""

    def lift(self, place: FaultPlace) -> None:
        """End it."""

    def figures(self) -> dict[str, float]:
        """What was measured beside."""
        return {}


class FullTemporary(Fault):
    """The directory for temporary files has no byte left."""

    told = "/tmp is full for 10 s"
    lasts_s: ClassVar[float | None] = 10.0

    @contextlib.contextmanager
    def around(self, place: FaultPlace) -> Iterator[None]:
        """A small file system of its own."""
        shell("mount", "-t", "tmpfs", "-o", "size=64m", "none", place.temporary)
        yield

    def strike(self, place: FaultPlace) -> None:
        """Fill it."""
        with contextlib.suppress(OSError), (place.temporary / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def lift(self, place: FaultPlace) -> None:
        """Empty it."""
        (place.temporary / "filler").unlink()


class FullTemporaryForGood(FullTemporary):
    """It stays full until the run has ended."""

    told = "/tmp is full until the run ends"
    lasts_s = None


class FullDisk(Fault):
    """The disk of the run fills while a chunk is written."""

    told = "the disk of the run fills"

    @contextlib.contextmanager
    def around(self, place: FaultPlace) -> Iterator[None]:
        """A file system for the run alone."""
        shell("mount", "-t", "tmpfs", "-o", "size=64m", "none", place.out.parent)
        yield

    def strike(self, place: FaultPlace) -> None:
        """Leave some KiB: a write ends in its middle."""
        status = os.statvfs(place.out.parent)
        used = (status.f_blocks - status.f_bfree) * status.f_frsize
        shell("mount", "-o", f"remount,size={used + 24 * 1024}", place.out.parent)

    def lift(self, place: FaultPlace) -> None:
        """Give it room again."""
        shell("mount", "-o", "remount,size=64m", place.out.parent)


class ReadOnlyDisk(Fault):
    """The disk of the run becomes read-only, as the kernel makes it after an error of the device."""

    told = "the disk of the run becomes read-only"

    @contextlib.contextmanager
    def around(self, place: FaultPlace) -> Iterator[None]:
        """An ext4 in a file."""
        image = place.folder / "disk.img"
        image.write_bytes(bytes(64 * MIB))
        shell("mkfs.ext4", "-q", image)
        shell("mount", "-o", "loop", image, place.out.parent)
        yield

    def strike(self, place: FaultPlace) -> None:
        """End its journal: what is open cannot be written any more."""
        shell("mount", "-o", "remount,abort", place.out.parent)

    def lift(self, place: FaultPlace) -> None:
        """Check it and mount it again."""
        shell("umount", place.out.parent)
        # Its exit code tells what it repaired.
        with contextlib.suppress(RuntimeError):
            shell("fsck.ext4", "-y", place.folder / "disk.img")
        shell("mount", "-o", "loop", place.folder / "disk.img", place.out.parent)


class FewFiles(Fault):
    """A process may have 256 files open."""

    told = "256 file descriptors for each process"

    @contextlib.contextmanager
    def around(self, place: FaultPlace) -> Iterator[None]:
        """The limit is inherited by all processes of the run."""
        place.prefix = ["prlimit", "--nofile=256:256", *place.prefix]
        place.options += ["--engines", "2"]
        yield


class ClockJumps(Fault):
    """The clock of the wall goes an hour ahead, for all processes of the run; the monotonic one does not."""

    told = "the clock goes an hour ahead"
    hours = 1

    @contextlib.contextmanager
    def around(self, place: FaultPlace) -> Iterator[None]:
        """Processes read the offset from a file."""
        library = place.folder / "clock.so"
        shell("cc", "-shared", "-fPIC", "-O1", "-o", library, Path(__file__).with_name("clock.c"), "-ldl")
        self._set(place, 0)
        place.env |= {"LD_PRELOAD": str(library), "HEDDLE_FAULT_CLOCK": str(place.folder / "clock")}
        yield

    def strike(self, place: FaultPlace) -> None:
        """Set it."""
        self._set(place, 3600 * self.hours)

    def _set(self, place: FaultPlace, offset_s: int) -> None:
        # Not truncated: processes have it mapped.
        descriptor = os.open(place.folder / "clock", os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(descriptor, offset_s.to_bytes(8, "little", signed=True))
        os.close(descriptor)


class ClockGoesBack(ClockJumps):
    """It goes back by an hour."""

    told = "the clock goes back by an hour"
    hours = -1


class StruckProcess(Fault):
    """One process of the run is killed or stopped; its own engine or worker, not another's."""

    def __init__(self, kind: str, strike_by: signal.Signals) -> None:
        self.told = f"{_STRUCK[kind]} is {'stopped' if strike_by == signal.SIGSTOP else 'killed'}"
        self._kind, self._signal = kind, strike_by

    @contextlib.contextmanager
    def around(self, place: FaultPlace) -> Iterator[None]:
        """Two of each kind, so that the run goes on."""
        place.options += ["--engines", "2", "--tool-workers", "2"]
        yield

    def strike(self, place: FaultPlace) -> None:
        """Signal the one that is oldest."""
        os.kill(min(process.pid for process in victims(self._kind)), self._signal)


class TenthFails(Fault):
    """Many trajectories, of which a tenth fail: no fault of the machine."""

    told = "a tenth of 5,000 trajectories fail"
    program = "often_fails"
    trajectories = 5000
    span_s = 90.0
    after = 2.0

    @contextlib.contextmanager
    def around(self, place: FaultPlace) -> Iterator[None]:
        """Their tools wait, and need no core of their own."""
        place.options += ["--tool-cpus", "16"]
        yield


_STRUCK = {"engine": "an engine", "rollout": "a rollout worker", "tool": "a tool worker", "scheduler": "the scheduler"}
FAULTS: dict[str, Callable[[], Fault]] = {
    "none": Fault,
    "tmp-full": FullTemporary,
    "tmp-stays-full": FullTemporaryForGood,
    "disk-full": FullDisk,
    "disk-read-only": ReadOnlyDisk,
    "few-files": FewFiles,
    "clock-ahead": ClockJumps,
    "clock-back": ClockGoesBack,
    "tenth-fails": TenthFails,
    **{
        f"{kind}-{name}": partial(StruckProcess, kind, by)
        for kind in _STRUCK
        for name, by in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP))
    },
}
