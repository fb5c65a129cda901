"""One writer per journal and per store.

On a local file system this is an advisory lock that the kernel releases when its holder dies. On a file system that
several machines share, such a lock may be missing (Lustre without its mount option ``flock``), or reach the processes
of one node only (``localflock``, BeeGFS by default): there a lease is taken besides (`lease`).
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.records.lease import Lease

# What file systems without `flock` answer; EBADF: NFS locks no directory (the journal of a run is locked there).
_NO_LOCKS = frozenset(
    {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
)
_SHARED = frozenset(
    {
        *("nfs", "nfs4", "lustre", "beegfs", "gpfs", "ceph", "cifs", "smb3", "afs", "panfs", "wekafs"),
        *("orangefs", "pvfs2", "ocfs2", "gfs2", "vxfs", "9p", "virtiofs", "fuse"),
    }
)


class WriterLock:
    """What this process holds on an open file or directory."""

    def __init__(self, descriptor: int, lease: Lease | None) -> None:
        self.descriptor = descriptor
        self._lease = lease

    @property
    def has_lease(self) -> bool:
        """Whether a lease keeps other machines away."""
        return self._lease is not None

    def check(self) -> None:
        """Before a write.

        Raises
        ------
        OSError
            Another process has become the writer.
        """
        if self._lease is not None:
            self._lease.check()

    def adopt(self, copy: WriterLock) -> None:
        """Go on with the open file of `copy`, which has taken the place of this one; its own lease ends."""
        os.close(self.descriptor)
        self.descriptor, copy.descriptor = copy.descriptor, -1
        copy.release()

    def release(self) -> None:
        """Give everything back and close the descriptor. A second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if self._lease is not None:
            self._lease.release()


def lock_or_refuse(descriptor: int, path: Path) -> WriterLock:
    """Lock an open file or directory for this process, until the lock is released.

    Raises
    ------
    BadInput
        If another process holds the lock, or the lock cannot be asked for. The descriptor is then closed.
    """
    try:
        needs_lease = not _locked_by_kernel(descriptor) or is_shared(path)
        return WriterLock(descriptor, Lease.take(path.absolute()) if needs_lease else None)
    except BlockingIOError:
        os.close(descriptor)
        raise BadInput(
            f"{path} is being written by another process: wait for it or choose another path"
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise BadInput(f"cannot lock {path}: {error.strerror}") from None
    except BaseException:
        os.close(descriptor)
        raise


def is_shared(path: Path) -> bool:
    """Whether the path is on a file system that other machines may write too."""
    kind = file_system_of(path.resolve(), _mounts())
    return kind.partition(".")[0] in _SHARED


def file_system_of(path: Path, mounts: str) -> str:
    """The type of the file system that holds an absolute path, by the text of ``/proc/self/mountinfo``."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields, _, source = line.partition(" - ")
        point = Path(fields.split()[4].encode().decode("unicode_escape"))
        # Of two file systems on one directory the later one is seen.
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), source.split()[0]
    return kind


def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text()
    except OSError:
        return ""


def _locked_by_kernel(descriptor: int) -> bool:
    """Whether `flock` has locked it; False where the file system knows no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True
