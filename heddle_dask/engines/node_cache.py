"""Directories on a node's own disk that are made once, whole or not at all, for all processes of the node.

Whoever makes one holds its lock alone, and the others wait; it takes its name when it is complete, and is ``….partial``
before. Whoever uses one shares its lock: what nobody uses may be removed.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from heddle_dask.engines.address import private_directory
from heddle_dask.engines.file_lock import FileLock

_PARTIAL = ".partial"


@dataclass(slots=True)
class HeldDirectory:
    """A complete directory in use; `release` it when it is needed no more."""

    path: Path
    _lock: FileLock | None = field(default=None, repr=False)

    def release(self) -> None:
        """Let it be removed. A second call does nothing."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class NodeCache:
    """The directories below one that is this user's alone; made with mode 0700 when absent."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def hold(
        self,
        name: str,
        is_whole: Callable[[Path], bool],
        make: Callable[[Path], None],
        stop: threading.Event,
    ) -> HeldDirectory:
        """The directory of this name, made now if there is none; blocks.

        Parameters
        ----------
        is_whole
            Whether a directory that has its name still has what it had then.
        make
            Fills the partial directory, which may be there from an attempt before.
        stop
            Set from another thread to give up waiting.

        Raises
        ------
        BadInput
            The directory is not this user's alone, or has no locks.
        LockStopped
        OSError
            The disk failed; nothing is left then.
        """
        private_directory(self._directory)
        path, partial = self._directory / name, self._directory / f"{name}{_PARTIAL}"
        lock = self._lock(name)
        try:
            while True:
                lock.acquire(shared=True, stop=stop)
                if is_whole(path):
                    return HeldDirectory(path, lock)
                # Not waited for: whoever has it makes the directory, and shares it for as long as it is used.
                if not lock.try_alone():
                    lock.pause(stop)
                elif not is_whole(path):
                    shutil.rmtree(path, ignore_errors=True)  # one that somebody has changed
                    self._make(partial, path, make)
        except BaseException:
            lock.release()
            raise

    def _make(self, partial: Path, path: Path, make: Callable[[Path], None]) -> None:
        try:
            partial.mkdir(exist_ok=True)
            make(partial)
            os.rename(partial, path)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def directories(self) -> Iterator[tuple[str, Path]]:
        """Name and path of each, also of those that are partial; in no order."""
        if self._directory.is_dir():
            for path in self._directory.iterdir():
                if path.is_dir():
                    yield path.name.removesuffix(_PARTIAL), path

    def remove_unused(self, name: str, path: Path) -> None:
        """Remove a directory, unless a process uses or makes it."""
        with self._lock(name).if_free() as held:
            if held:
                shutil.rmtree(path, ignore_errors=True)
                (self._directory / f"{name}.lock").unlink(missing_ok=True)

    def _lock(self, name: str) -> FileLock:
        return FileLock(self._directory / f"{name}.lock")
