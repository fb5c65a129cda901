"""The scratch directory of one job: made at its start, removed at its end, whatever the end is.

A job that is killed cannot remove it. So the directory is locked while its job lives, and the next job on the node
removes those of this user without a lock. Scratch is node-local, where locks work.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from heddle_dask.core.errors import BadInput

_PREFIX = "heddle-job-"
_LOCK = ".lock"


@contextlib.contextmanager
def job_scratch(base: Path | None) -> Iterator[Path]:
    """A new directory of mode 0700 in `base`, or in the directory for temporary files.

    Raises
    ------
    BadInput
        It cannot be made there.
    """
    place = Path(tempfile.gettempdir()) if base is None else base
    try:
        place.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(place)
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    except OSError as error:
        raise BadInput(
            f"scratch {place} cannot be used ({error.strerror}): name a directory on this node with --scratch"
        ) from error
    # It gets its name when it is locked: no other job finds it without.
    new = path / (_LOCK + ".new")
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(path / _LOCK)
        yield path
    finally:
        # Removed while it is locked: no other job removes it at the same time.
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(place: Path) -> None:
    for path in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue
            # A directory without the file is one that another job is just making.
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
