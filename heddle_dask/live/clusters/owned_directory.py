"""Directories that go with their owner, whatever ends it: made at its start, removed at its end.

An owner that is killed cannot remove its directory. So the directory is locked while its owner lives, and whoever makes
the next one beside it removes those of this user that nobody locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from heddle_dask.engines.supervised_process import kill_stale
from heddle_dask.engines.watchdog import boot_id

_LOCK = ".lock"


class OwnedDirectory:
    """A new directory of mode 0700 in `place`, or in the directory for temporary files.

    Parameters
    ----------
    prefix
        With which its name begins, and those of the abandoned ones that are removed first.
    is_shared
        Whether other machines see `place`. Their locks may be unknown here: what they made is left alone.
    """

    def __init__(self, prefix: str, place: Path | None = None, *, is_shared: bool = False) -> None:
        place = Path(tempfile.gettempdir()) if place is None else place
        place.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(place, prefix, is_shared)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        # It gets its name when it is locked: nobody finds it without.
        new = self.path / (_LOCK + ".new")
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # some shared file systems have no locks: nobody will remove it
            os.write(self._lock, boot_id().encode())
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            new.rename(self.path / _LOCK)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove it with all that is in it; a second call does nothing."""
        if self._lock >= 0:
            _remove(self.path)  # while it is locked: nobody else removes it at the same time
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(place: Path, prefix: str, is_shared: bool) -> None:
    for path in place.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue
            # A directory without the file is one that another process is just making.
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not is_shared or os.read(lock, 100) == boot_id().encode():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    kill_stale(str(path))  # what its programs have left: processes, shared memory
                    _remove(path)
            finally:
                os.close(lock)


def _remove(path: Path) -> None:
    """The lock goes last: what a process that still ends writes meanwhile is found the next time."""
    with contextlib.suppress(OSError):
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _LOCK:
                entry.unlink(missing_ok=True)
        if [entry.name for entry in path.iterdir()] in ([], [_LOCK]):
            shutil.rmtree(path, ignore_errors=True)
