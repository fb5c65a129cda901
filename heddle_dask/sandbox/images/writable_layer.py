"""The files of an image with a private layer over them, into which one sandbox writes.

Where the kernel can, the layer is an overlay: mounted in a user and a mount namespace of the sandbox's own, which a
sleeping process holds. It needs no privilege. Elsewhere the files are copied. Both use programs of util-linux alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from heddle_dask.sandbox.confinement import DiskUsage
from heddle_dask.sandbox.images.archive import BadImage
from heddle_dask.sandbox.images.cache import IMAGE_UID
from heddle_dask.sandbox.program_files import disk_usage, remove

_MOUNT_S = 30.0
# The process that holds the namespaces ends with its standard input, and so with the worker.
_HOLD = 'mount -t overlay overlay -o "$0" "$1" && echo mounted && exec cat'


class WritableLayer(Protocol):
    """The files of one sandbox.

    Attributes
    ----------
    root
        The files as this process reaches them, if it acts as their owner (`acting_as`).
    """

    root: Path

    def enter(self) -> tuple[str, ...]:
        """What a command begins with that reaches the files at `inside`, as root of a user namespace."""

    @property
    def inside(self) -> str: ...

    def usage(self) -> DiskUsage:
        """What the sandbox has written."""

    def close(self) -> None:
        """End what holds it; the files stay."""


def as_user(uid: int | None) -> tuple[str, ...]:
    """What a command begins with that is to run as another user."""
    if uid is None:
        return ()
    return (_program("setpriv"), "--reuid", str(uid), "--regid", str(uid), "--clear-groups")


def _program(name: str) -> str:
    found = shutil.which(name, path="/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    if found is None:
        raise BadImage(f"sandbox of an image: no program {name} on this machine: install the package util-linux")
    return found


class OverlayLayer:
    """An overlay, with its layer in a folder.

    Parameters
    ----------
    lower
        The image's files.
    folder
        Has the layer (``upper``), which may have files already, and the kernel's own folder (``scratch``).
    uid
        Owner of all of them; None: this process's own user.

    Raises
    ------
    OSError
        This machine or file system cannot.
    """

    def __init__(self, lower: str, folder: Path, uid: int | None) -> None:
        self._upper = folder / "upper"
        self._uid = uid
        self.inside = str(folder / "root")
        for each in (self._upper, folder / "scratch", folder / "root"):
            each.mkdir(exist_ok=True)
            each.chmod(0o755)
            if uid is not None:
                os.chown(each, uid, uid)
        if any(letter in f"{lower}{folder}" for letter in ',:\\"'):
            raise OSError(f"the kernel takes no path such as {folder} for an overlay")
        os.setxattr(self._upper, "user.heddle", b"1")  # without such attributes no folder can replace another
        os.removexattr(self._upper, "user.heddle")
        options = f"lowerdir={lower},upperdir={self._upper},workdir={folder / 'scratch'},userxattr"
        argv = [*as_user(uid), _program("unshare"), "--user", "--map-root-user", "--mount", "--"]
        argv += ["/bin/sh", "-c", _HOLD, options, self.inside]
        self._holder = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        told = self._holder.stdout.readline()
        if told != b"mounted\n":
            self.close()
            raise OSError(told.decode("utf-8", "replace").strip()[:300])
        self.root = Path(f"/proc/{self._holder.pid}/root{self.inside}")

    def enter(self) -> tuple[str, ...]:
        if self._holder.poll() is not None:
            raise OSError("the process that holds its files has ended")
        spaces = f"/proc/{self._holder.pid}/ns"
        nsenter = (
            _program("nsenter"),
            "--preserve-credentials",
            f"--user={spaces}/user",
            f"--mount={spaces}/mnt",
            "--",
        )
        return (*as_user(self._uid), *nsenter)

    def usage(self) -> DiskUsage:
        return disk_usage(str(self._upper))

    def close(self) -> None:
        assert self._holder.stdin is not None and self._holder.stdout is not None
        with contextlib.suppress(OSError):
            self._holder.stdin.close()
        try:
            self._holder.wait(_MOUNT_S)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()
        self._holder.stdout.close()


class CopiedLayer:
    """A copy of the image's files, sharing their blocks where the file system can."""

    def __init__(self, lower: str, folder: Path, uid: int | None) -> None:
        self._uid = uid
        self.root = folder / "copy"
        self.inside = str(self.root)
        if not self.root.exists():
            done = subprocess.run(
                ["cp", "-a", "--reflink=auto", "--", lower, self.root], capture_output=True, text=True
            )
            if done.returncode:
                raise BadImage(f"sandbox of an image: its files were not copied: {done.stderr.strip()[-300:]}")
        self._before = disk_usage(lower)

    def enter(self) -> tuple[str, ...]:
        return (*as_user(self._uid), _program("unshare"), "--user", "--map-root-user", "--")

    def usage(self) -> DiskUsage:
        now = disk_usage(str(self.root))
        return DiskUsage(max(0, now.used_bytes - self._before.used_bytes), max(0, now.files - self._before.files))

    def close(self) -> None:
        pass


def limited(processes: int) -> tuple[str, ...]:
    """What a command begins with inside, after which it has at most that many processes.

    The limit must not count before: the user of all sandboxes of images would have it for all of them together.
    """
    return (_program("prlimit"), f"--nproc={processes}:{processes}", "--")


def overlay_failure(directory: Path) -> str:
    """Why there is no overlay for files in this directory; empty if there is one."""
    folder = Path(tempfile.mkdtemp(prefix="probe.new-", dir=directory))
    uid = IMAGE_UID if os.geteuid() == 0 else None
    try:
        folder.chmod(0o711)
        (folder / "lower").mkdir()
        OverlayLayer(str(folder / "lower"), folder, uid).close()
    except OSError as error:
        return str(error)
    finally:
        remove(str(folder))
    return ""


@contextmanager
def acting_as(uid: int | None) -> Iterator[None]:
    """Let this thread open and make files as another user.

    Root itself has no number in the user namespace of an overlay, and so can make nothing there.
    """
    if uid is None:
        yield
        return
    library = ctypes.CDLL(None)
    library.setfsgid(uid)
    library.setfsuid(uid)
    try:
        yield
    finally:
        library.setfsuid(0)
        library.setfsgid(0)
