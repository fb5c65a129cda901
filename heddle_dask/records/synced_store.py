"""A Zarr directory that survives a crash of the machine: a file is on disk before it takes its name."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore

# An append writes about a hundred files; the file system syncs those that wait at the same time together.
_SYNC_THREADS = 16
# What some network file systems answer to a sync of a directory.
_NOT_FOR_DIRECTORIES = frozenset({errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP})


class SyncedStore(LocalStore):
    """A `LocalStore` whose writes take effect in groups.

    What is set is read back at once, and by no other reader before `settle`. One thread at a time.
    """

    def __init__(self, root: Path | str, *, read_only: bool = False) -> None:
        super().__init__(root, read_only=read_only)
        self._waiting: dict[str, Path] = {}

    async def set(self, key: str, value: Buffer) -> None:
        """Write one file aside."""
        if not self._is_open:
            await self._open()
        self._check_writable()
        path = self.root / key
        aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
        await asyncio.to_thread(_write, aside, value)
        await self._drop(key)
        self._waiting[key] = aside

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        return await super().get(self._name_of(key), prototype, byte_range)

    async def exists(self, key: str) -> bool:
        return await super().exists(self._name_of(key))

    async def delete(self, key: str) -> None:
        await self._drop(key)
        await super().delete(key)

    def settle(self) -> None:
        """Wait until everything that was set is on disk, give it its names, and wait until these are there.

        Raises
        ------
        OSError
            The disk refuses. Any number of files have their names; `discard` removes the others.
        """
        waiting = {self.root / key: aside for key, aside in self._waiting.items()}
        with ThreadPoolExecutor(_SYNC_THREADS) as threads:
            _sync_all(threads, waiting.values())
            for path, aside in waiting.items():
                os.replace(aside, path)
            _sync_all(threads, {folder for path in waiting for folder in (path.parent, path.parent.parent)})
        self._waiting.clear()

    def discard(self) -> None:
        """Forget what was set and has not its name yet."""
        for aside in self._waiting.values():
            aside.unlink(missing_ok=True)
        self._waiting.clear()

    def _name_of(self, key: str) -> str:
        aside = self._waiting.get(key)
        return key if aside is None else str(aside.relative_to(self.root))

    async def _drop(self, key: str) -> None:
        aside = self._waiting.pop(key, None)
        if aside is not None:
            await asyncio.to_thread(aside.unlink, missing_ok=True)


def sync_path(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk.

    Raises
    ------
    OSError
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_DIRECTORIES or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _sync_all(threads: ThreadPoolExecutor, paths: Iterable[Path]) -> None:
    for _ in threads.map(sync_path, paths):
        pass


def _write(path: Path, value: Buffer) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "wb") as file:
            file.write(value.as_buffer_like())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
