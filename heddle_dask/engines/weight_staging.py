"""Model weights on a node's own disk: copied there once from the shared file system, for all engines of the node.

A copy is a directory ``NAME-DIGEST``; the digest is of the model's path and of names, sizes and times of its files, so
that a changed model gets a copy of its own. Whoever copies holds the lock of that copy alone, and the others wait; a
copy takes its name when it is complete. Whoever uses a copy shares its lock until its engine has ended: a copy that
nobody uses is removed when another one needs its room, and stays otherwise, for later jobs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.address import private_directory

_LOG = logging.getLogger(__name__)
_CHUNK_BYTES = 64 << 20
# A disk that is filled to the last byte stops everybody who uses it.
_SPARE_BYTES = 1 << 30
_LOOK_S = 0.5


@dataclass(slots=True)
class StagedWeights:
    """A model directory to start an engine from; `release` it when the engine has ended.

    Attributes
    ----------
    path
        The copy, or the model's own path if it could not be copied.
    why_not
        Why it was not copied; empty if it was.
    """

    path: str
    why_not: str = ""
    _lock: int = -1

    def release(self) -> None:
        """Let the copy be removed when its room is needed. A second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class StagingStopped(Exception):
    """The copy was given up because its engine is not wanted any more."""


def stage_weights(model: str, directory: Path, stop: threading.Event | None = None) -> StagedWeights:
    """The copy of a model directory under `directory`, made now if there is none.

    Parameters
    ----------
    model
        What is no directory (a name that the engine downloads) is left as it is.
    directory
        On the node's own disk; made with mode 0700 when absent.
    stop
        Set from another thread to give up.

    Raises
    ------
    BadInput
        `directory` is not this user's alone, or has no locks.
    StagingStopped
    """
    source = Path(model)
    if not source.is_dir():
        return StagedWeights(model, f"{model} is no directory")
    stop = stop or threading.Event()
    private_directory(directory)
    files = _files(source)
    name = f"{source.resolve().name}-{_digest(source, files)}"
    lock = _open_lock(directory, name)
    try:
        copy = directory / name
        while True:
            _lock(lock, directory, fcntl.LOCK_SH, stop)
            if _is_whole(copy, files):
                break
            # The shared lock is given up first: of two processes that wait here, one gets on.
            _lock(lock, directory, fcntl.LOCK_EX, stop)
            if _is_whole(copy, files):
                continue
            why_not = _make_room(directory, name, sum(files.values())) or _copy(source, copy, files, stop)
            if why_not:
                _LOG.warning("weights of %s are read from there: %s", model, why_not)
                os.close(lock)
                return StagedWeights(model, why_not)
        os.utime(copy)  # the copy that was not used for longest goes first
        return StagedWeights(str(copy), _lock=lock)
    except BaseException:
        os.close(lock)
        raise


def _files(source: Path) -> dict[str, int]:
    """Sizes of a model's files by their path in its directory; what links point to counts."""
    found = {}
    for root, directories, names in os.walk(source, followlinks=True):
        directories[:] = [each for each in directories if not each.startswith(".")]
        for name in names:
            path = Path(root) / name
            if path.is_file() and not name.startswith("."):
                found[str(path.relative_to(source))] = path.stat().st_size
    return found


def _digest(source: Path, files: dict[str, int]) -> str:
    facts = [f"{name}\0{size}\0{(source / name).stat().st_mtime_ns}" for name, size in sorted(files.items())]
    return hashlib.sha256("\0\0".join([str(source.resolve()), *facts]).encode()).hexdigest()[:16]


def _open_lock(directory: Path, name: str) -> int:
    return os.open(directory / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _lock(descriptor: int, directory: Path, how: int, stop: threading.Event) -> None:
    """Wait for a lock; another job of the node may be copying."""
    while True:
        if stop.is_set():
            raise StagingStopped
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_LOOK_S)
        except OSError as error:
            raise BadInput(
                f"weights cannot be staged in {directory}: it has no locks ({error.strerror}): use a directory on the "
                "node's own disk"
            ) from None


def _is_whole(copy: Path, files: dict[str, int]) -> bool:
    return copy.is_dir() and _files(copy) == files


def _make_room(directory: Path, name: str, needed_bytes: int) -> str:
    """Remove copies that nobody uses until there is room; otherwise why there is none."""
    for leftover in directory.glob(f"{name}.partial"):  # of a process that was killed: its lock is ours now
        shutil.rmtree(leftover, ignore_errors=True)
    copies = sorted(
        (each for each in directory.iterdir() if each.is_dir()), key=lambda each: each.stat().st_mtime
    )
    for copy in copies:
        if shutil.disk_usage(directory).free >= needed_bytes + _SPARE_BYTES:
            break
        _remove_if_unused(directory, copy)
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes >= needed_bytes + _SPARE_BYTES:
        return ""
    return (
        f"{directory} has {free_bytes >> 20} MiB free, and {(needed_bytes + _SPARE_BYTES) >> 20} are needed"
    )


def _remove_if_unused(directory: Path, copy: Path) -> None:
    lock = _open_lock(directory, copy.name.removesuffix(".partial"))
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(copy, ignore_errors=True)
    finally:
        os.close(lock)


def _copy(source: Path, copy: Path, files: dict[str, int], stop: threading.Event) -> str:
    """Copy, then give the copy its name; otherwise why it failed."""
    partial = copy.with_name(copy.name + ".partial")
    try:
        shutil.rmtree(copy, ignore_errors=True)  # one that somebody has changed
        for name in files:
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy_file(source / name, target, stop)
        if _files(partial) != files:
            return f"{source} has changed while it was copied"
        os.rename(partial, copy)
        return ""
    except OSError as error:
        return f"{error.strerror} ({error.filename})"
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy_file(source: Path, target: Path, stop: threading.Event) -> None:
    with source.open("rb") as reading, target.open("wb") as writing:
        while not stop.is_set():
            if os.sendfile(writing.fileno(), reading.fileno(), None, _CHUNK_BYTES) == 0:
                return
    raise StagingStopped
