"""One writer per journal and per store: an advisory lock that the kernel releases when its holder dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from heddle_dask.core.errors import BadInput


def lock_or_refuse(descriptor: int, path: Path) -> None:
    """Lock an open file or directory for this process, until the descriptor is closed.

    On file systems without locks (some cluster mounts) this does nothing, and there is no protection against a second
    writer.

    Raises
    ------
    BadInput
        If another process holds the lock. The descriptor is then closed.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise BadInput(
            f"{path} is being written by another process: wait for it or choose another path"
        ) from None
    except OSError:
        return
