"""Model weights on a node's own disk: copied there once from the shared file system, for all engines of the node.

A copy is a directory ``NAME-DIGEST`` in a `NodeCache`; the digest is of the model's path and of names, sizes and times
of its files, so that a changed model gets a copy of its own. A copy that no engine uses is removed when another one
needs its room, and stays otherwise, for later jobs.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

from heddle_dask.core.errors import HeddleError
from heddle_dask.engines.file_lock import LockStopped
from heddle_dask.engines.node_cache import HeldDirectory, NodeCache

_LOG = logging.getLogger(__name__)
_CHUNK_BYTES = 64 << 20
# A disk that is filled to the last byte stops everybody who uses it.
_SPARE_BYTES = 1 << 30


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
    _held: HeldDirectory | None = field(default=None, repr=False)

    def release(self) -> None:
        """Let the copy be removed when its room is needed. A second call does nothing."""
        if self._held is not None:
            self._held.release()


class StagingStopped(Exception):
    """The copy was given up because its engine is not wanted any more."""


class _NotCopied(HeddleError):
    """Why the engine reads the shared file system, in one line."""


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
    cache, files = NodeCache(directory), _files(source)

    def make(partial: Path) -> None:
        shutil.rmtree(partial)  # of a process that was killed
        try:
            _make_room(cache, directory, sum(files.values()))
            _copy(source, partial, files, stop)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    try:
        name = f"{source.resolve().name}-{_digest(source, files)}"
        held = cache.hold(name, lambda copy: copy.is_dir() and _files(copy) == files, make, stop)
    except LockStopped:
        raise StagingStopped from None
    except (OSError, _NotCopied) as error:
        why_not = f"{error.strerror} ({error.filename})" if isinstance(error, OSError) else str(error)
        _LOG.warning("weights of %s are read from there: %s", model, why_not)
        return StagedWeights(model, why_not)
    os.utime(held.path)  # the copy that was not used for longest goes first
    return StagedWeights(str(held.path), _held=held)


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


def _make_room(cache: NodeCache, directory: Path, needed_bytes: int) -> None:
    """Remove copies that nobody uses until there is room."""
    for name, copy in sorted(cache.directories(), key=lambda each: each[1].stat().st_mtime):
        if shutil.disk_usage(directory).free >= needed_bytes + _SPARE_BYTES:
            break
        cache.remove_unused(name, copy)
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes + _SPARE_BYTES:
        raise _NotCopied(
            f"{directory} has {free_bytes >> 20} MiB free, and {(needed_bytes + _SPARE_BYTES) >> 20} are needed"
        )


def _copy(source: Path, partial: Path, files: dict[str, int], stop: threading.Event) -> None:
    for name in files:
        target = partial / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy_file(source / name, target, stop)
    if _files(partial) != files:
        raise _NotCopied(f"{source} has changed while it was copied")


def _copy_file(source: Path, target: Path, stop: threading.Event) -> None:
    with source.open("rb") as reading, target.open("wb") as writing:
        while not stop.is_set():
            if os.sendfile(writing.fileno(), reading.fileno(), None, _CHUNK_BYTES) == 0:
                return
    raise StagingStopped
