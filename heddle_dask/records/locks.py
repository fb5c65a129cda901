"""One writer per journal and per store: an advisory lock that the kernel releases when its holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from heddle_dask.core.errors import BadInput

# What file systems without `flock` answer; EBADF: NFS locks no directory (the journal of a run is locked there).
_NO_LOCKS = frozenset(
    {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
)


def lock_or_refuse(descriptor: int, path: Path) -> bool:
    """Lock an open file or directory for this process, until the descriptor is closed.

    Returns
    -------
    bool
        False on file systems without locks (some cluster mounts): then nothing keeps a second writer away.

    Raises
    ------
    BadInput
        If another process holds the lock, or the lock cannot be asked for. The descriptor is then closed.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise BadInput(
            f"{path} is being written by another process: wait for it or choose another path"
        ) from None
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        os.close(descriptor)
        raise BadInput(f"cannot lock {path}: {error.strerror}") from None
    return True
