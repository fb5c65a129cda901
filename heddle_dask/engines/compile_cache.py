"""What engines have compiled: kept on the node, and made once for all engines of one description.

The first engine of a description compiles; those that start meanwhile wait until its log says that it has done so. They
go on when it dies, and after a limit in any case: an engine that finds nothing compiles for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.address import engines_directory
from heddle_dask.engines.file_lock import FileLock

WAIT_S = 300.0
_POLL_S = 0.2
_FOLDERS = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton"}
# With their values: they differ between engines whose compiled code is the same.
_EACH_ITS_OWN = ("--seed", "--uds", "--host", "--port", "--kv-transfer-config")


def cache_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Where vLLM and Triton keep what they compile: as the user or the cluster file says, else on this node."""
    return {name: environ.get(name) or str(engines_directory() / folder) for name, folder in _FOLDERS.items()}


def description_of(argv: Sequence[str], *versions: str) -> str:
    """A digest that engines with the same compiled code have in common."""
    common = [
        argument
        for at, argument in enumerate(argv)
        if argument not in _EACH_ITS_OWN and (at == 0 or argv[at - 1] not in _EACH_ITS_OWN)
    ]
    return hashlib.sha256("\0".join((*common, *versions)).encode()).hexdigest()[:32]


class CompileTurn:
    """The turn of one engine.

    Parameters
    ----------
    description
        As `description_of`; empty: the engine compiles nothing, and has no turn to wait for.
    """

    def __init__(self, description: str, environ: Mapping[str, str] = os.environ) -> None:
        self._description = description
        self._directory = Path(cache_variables(environ)["VLLM_CACHE_ROOT"]) / "heddle" if description else None
        self._lock: FileLock | None = None

    @property
    def _mark(self) -> Path:
        assert self._directory is not None
        return self._directory / f"{self._description}.compiled"

    async def begin(self, limit_s: float, on_wait: Callable[[], None] = lambda: None) -> None:
        """Wait while another engine of this description compiles, at most so long."""
        if self._directory is None:
            return
        ends_s = time.monotonic() + limit_s
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = FileLock(self._directory / f"{self._description}.lock")
            while not self._mark.exists():
                if lock.try_alone():
                    self._lock = lock
                    return
                if time.monotonic() >= ends_s:
                    return
                on_wait()
                await asyncio.sleep(_POLL_S)
        except (OSError, BadInput):
            return  # a directory without locks: each compiles for itself

    def compiled(self) -> None:
        """The engine has compiled: the others may start."""
        if self._lock is not None:
            # Without the mark the next one has its turn, and finds the code in the cache.
            with contextlib.suppress(OSError):
                self._mark.touch(mode=0o600)
            self.end()

    def end(self) -> None:
        """The engine compiles no more, whatever became of it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
