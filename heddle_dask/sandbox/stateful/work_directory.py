"""The directory of one sandbox on its machine: its files, its ``/tmp``, and the record of its owner.

A path inside is never followed through a link: the sandbox's programs make the links, and the worker may read more than
they may.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path, PurePosixPath

from heddle_dask.isolation.process_tree import start_of
from heddle_dask.sandbox.confinement import DiskUsage
from heddle_dask.sandbox.program_files import disk_usage, remove
from heddle_dask.sandbox.stateful.contract import SandboxFailed, relative_path

_OWNER = "owner.json"
_PREFIX = "box-"
# Ten digits for every id, so that columns of a listing keep their width.
_FIRST_UID, _UIDS = 1_100_000_000, 1_000_000_000


class WorkDirectory:
    """Files of one sandbox.

    Attributes
    ----------
    uid
        User that owns the files and runs the commands; None: the worker's own user.
    """

    def __init__(self, base: Path, name: str, *, private_user: bool) -> None:
        digest = blake2b(name.encode(), digest_size=8).digest()
        self.path = base / f"{_PREFIX}{os.getpid()}-{digest.hex()}"
        self.work = self.path / "work"
        self.tmp = self.path / "tmp"
        # Follows from the name: a sandbox that is rebuilt elsewhere shows the same.
        self.uid = _FIRST_UID + int.from_bytes(digest, "big") % _UIDS if private_user else None

    def make(self) -> None:
        self._make_shell()
        for folder in (self.work, self.tmp):
            folder.mkdir()
            folder.chmod(0o755)  # what enters it for its user need not be its owner
            self._give(folder)

    def _make_shell(self) -> None:
        remove(str(self.path))
        self.path.mkdir()
        self.path.chmod(0o711)  # whatever the umask of the worker is: a job's is 077
        owner = {"pid": os.getpid(), "started": start_of(os.getpid()), "host": os.uname().nodename}
        (self.path / _OWNER).write_text(json.dumps(owner))
        uid, gid = (1000, 1000) if self.uid is None else (self.uid, self.uid)
        (self.path / "passwd").write_text(f"root:x:0:0::/:/bin/sh\nagent:x:{uid}:{gid}::/home/agent:/bin/sh\n")
        (self.path / "group").write_text(f"root:x:0:\nagent:x:{gid}:\n")
        for name in ("passwd", "group"):
            (self.path / name).chmod(0o644)

    def copy_of(self, other: WorkDirectory) -> None:
        """Make it with a copy of the other's files, sharing their blocks where the file system can."""
        self._make_shell()
        self._copy(other.work, other.tmp)
        if self.uid is not None:
            owner = f"{self.uid}:{self.uid}"
            owned = subprocess.run(["chown", "-Rh", owner, "--", str(self.work), str(self.tmp)], capture_output=True)
            if owned.returncode:
                raise SandboxFailed("sandbox: its files were copied, and could not be given to its user")

    def _copy(self, *folders: Path) -> None:
        copied = subprocess.run(
            ["cp", "-a", "--reflink=auto", "--", *folders, self.path], capture_output=True, text=True, errors="replace"
        )
        if copied.returncode:
            raise SandboxFailed(f"sandbox: its files were not copied: {copied.stderr.strip()[:300]}")

    def _give(self, path: Path) -> None:
        if self.uid is not None:
            os.chown(path, self.uid, self.uid)

    def put(self, path: str, content: bytes) -> None:
        parts = self._parts(path)
        folder = self._open_folder(parts[:-1], make=True)
        try:
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(os.stat(parts[-1], dir_fd=folder, follow_symlinks=False).st_mode):
                    raise SandboxFailed(f"sandbox file {path!r}: it is a folder or a link")
                os.unlink(parts[-1], dir_fd=folder)  # it may have another owner, or be read-only
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(parts[-1], flags, 0o644, dir_fd=folder)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                if self.uid is not None:
                    os.fchown(handle, self.uid, self.uid)
        except OSError as error:
            raise SandboxFailed(f"sandbox file {path!r}: {error.strerror}") from error
        finally:
            os.close(folder)

    def get(self, path: str, most_bytes: int) -> bytes:
        parts = self._parts(path)
        folder = self._open_folder(parts[:-1], make=False)
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = os.open(parts[-1], flags, dir_fd=folder)
            with os.fdopen(handle, "rb") as file:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise SandboxFailed(f"sandbox file {path!r}: it is no file")
                content = file.read(most_bytes + 1)
        except OSError as error:
            raise SandboxFailed(f"sandbox file {path!r}: {error.strerror}") from error
        finally:
            os.close(folder)
        if len(content) > most_bytes:
            raise SandboxFailed(f"sandbox file {path!r}: it is longer than {most_bytes:,} bytes")
        return content

    def _top(self) -> Path:
        """The folder below which all paths are."""
        return self.work

    def _parts(self, path: str) -> tuple[str, ...]:
        return PurePosixPath(relative_path(path)).parts

    def _open_folder(self, parts: tuple[str, ...], *, make: bool) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self._top(), flags)
        for part in parts:
            try:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=handle)
                        if self.uid is not None:
                            os.chown(part, self.uid, self.uid, dir_fd=handle, follow_symlinks=False)
                below = os.open(part, flags, dir_fd=handle)
            except OSError as error:
                raise SandboxFailed(f"sandbox folder {'/'.join(parts)!r}: {error.strerror}") from error
            finally:
                os.close(handle)
            handle = below
        return handle

    def usage(self, pids: Sequence[int] = ()) -> DiskUsage:
        """What its files take, with those that its processes have deleted and still hold open."""
        work, tmp = disk_usage(str(self.work), pids), disk_usage(str(self.tmp))
        return DiskUsage(work.used_bytes + tmp.used_bytes, work.files + tmp.files)

    def delete(self) -> None:
        remove(str(self.path))


def reap(base: Path) -> list[str]:
    """Delete the sandboxes of workers that have died; returns the names of their directories.

    Their processes have ended with the worker: the supervisor of each command sees its end.
    """
    reaped = [path for path in sorted(base.glob(f"{_PREFIX}*")) if _is_left(path)]
    for path in reaped:
        remove(str(path))
    return [path.name for path in reaped]


def _is_left(path: Path) -> bool:
    """Whether no process owns this directory any more."""
    try:
        owner = json.loads((path / _OWNER).read_text(encoding="ascii"))
        return bool(owner["host"] == os.uname().nodename and start_of(int(owner["pid"])) != int(owner["started"]))
    except FileNotFoundError:
        pid = path.name.split("-")[1]
        return not (pid.isdecimal() and start_of(int(pid)))  # else it is being made
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True  # half written when the machine went down
