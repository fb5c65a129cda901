"""Locks on files of a node's own disk, shared by all processes of the node and given up when their owner dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from heddle_dask.core.errors import BadInput, HeddleError

_LOOK_S = 0.05


class LockStopped(HeddleError):
    """The wait for a lock was given up."""


class FileLock:
    """One lock, alone or shared; its file is made when absent and may be removed by who holds it alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def acquire(self, *, shared: bool, stop: threading.Event) -> None:
        """Wait for the lock; one that is held is given up first.

        Raises
        ------
        LockStopped
            `stop` was set.
        BadInput
            The file system has no locks.
        """
        self.release()
        while not self._try(fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            self.pause(stop)

    def try_alone(self) -> bool:
        """Take the lock alone where nobody has it; one that is held is given up in any case."""
        self.release()
        return self._try(fcntl.LOCK_EX)

    def pause(self, stop: threading.Event) -> None:
        """Wait a moment before the next attempt; raises `LockStopped` when `stop` is set."""
        if stop.is_set():
            raise LockStopped(f"the wait for {self._path} was given up")
        time.sleep(_LOOK_S)

    def release(self) -> None:
        """Give the lock up; does nothing when it is not held."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @contextlib.contextmanager
    def if_free(self) -> Iterator[bool]:
        """Hold the lock alone where nobody has it; says whether it is held."""
        try:
            yield self._try(fcntl.LOCK_EX)
        finally:
            self.release()

    def _try(self, how: int) -> bool:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            # Whoever held it may have removed the file, and another process made a new one.
            if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                self._descriptor = descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError as error:
            os.close(descriptor)
            raise BadInput(
                f"weights cannot be kept in {self._path.parent}: it has no locks ({error.strerror}): use a "
                "directory on the node's own disk"
            ) from None
        if self._descriptor < 0:
            os.close(descriptor)
        return self._descriptor >= 0
