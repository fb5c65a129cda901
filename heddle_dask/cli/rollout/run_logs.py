"""The logs of a run's processes: kept beside the run, one directory for each session that writes to it.

``RUN.logs/session-1/`` holds the logs of the scheduler, the workers and the engines of one local cluster. Programs
write them there themselves, so that they are there also after a crash. Their size is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.inputs.rollout_inputs import WriteMode

KEPT_BYTES = 10 * 1024 * 1024
"""Of each log the last 10 MB."""
SESSIONS_KEPT = 20
_CHECK_INTERVAL_S = 30.0
_TAIL_LINES = 4
_TAIL_LINE_CHARS = 300
_TAIL_BYTES = 64 * 1024
_SESSION = re.compile(r"session-(\d+)\Z")


def logs_path(out: Path) -> Path:
    """The directory of logs that belongs to the store at `out`."""
    return out.with_name(out.name.removesuffix(".zarr") + ".logs")


class RunLogs:
    """The logs of this session, beside those of earlier ones."""

    def __init__(self, out: Path, mode: WriteMode) -> None:
        self._root = logs_path(out)
        self._out = out
        self._mode = mode
        self._began_s = 0.0
        if self._root.is_symlink() or (self._root.exists() and not self._root.is_dir()):
            raise BadInput(f"{self._root} is no directory: logs of the run go there; choose another --out")
        numbers = [number for number, _ in self._sessions()]
        self.path = self._root / f"session-{max(numbers, default=0) + 1}"

    def _sessions(self) -> list[tuple[int, Path]]:
        """Number and directory of each session, oldest first."""
        paths = self._root.iterdir() if self._root.is_dir() else ()
        found = [(int(match[1]), path) for path in paths if (match := _SESSION.match(path.name))]
        return sorted(each for each in found if each[1].is_dir() and not each[1].is_symlink())

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[Path]:
        """The directory for the logs while the cluster runs; afterwards they stay, those of a replaced run go."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise BadInput(f"cannot write logs to {self.path}: {error.strerror}") from None
        self._began_s = time.time()
        bounding = asyncio.create_task(self._bound_sizes())
        try:
            yield self.path
        finally:
            bounding.cancel()
            await asyncio.wait([bounding])
            self._remove_old()
            # Those of a session that was killed are as long as they were.
            for _, path in self._sessions():
                bound_logs(path)
            # Nothing was started, and nothing is left of it.
            with contextlib.suppress(OSError):
                self.path.rmdir()
                self._root.rmdir()

    def tail(self, name: str) -> str:
        """The last lines of the log `name` with its path, as the end of a one-line message; empty without a log."""
        path = self.path / f"{name}.log"
        last = log_tail(path)
        return f" (log: {path}{': ' if last else ''}{last})" if path.exists() else ""

    async def _bound_sizes(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            await asyncio.to_thread(bound_logs, self.path, 2 * KEPT_BYTES)

    def _remove_old(self) -> None:
        """Remove the logs of the run that this session replaced, and of the oldest sessions."""
        others = [path for _, path in self._sessions() if path != self.path]
        replaced = self._mode in ("create", "overwrite") and self._has_made_the_run()
        for path in others if replaced else others[: max(0, len(others) + 1 - SESSIONS_KEPT)]:
            shutil.rmtree(path, ignore_errors=True)

    def _has_made_the_run(self) -> bool:
        """Whether the store was written by this session: then logs of earlier ones are of another run."""
        try:
            return (self._out / "zarr.json").stat().st_mtime >= self._began_s
        except (FileNotFoundError, NotADirectoryError):
            return False


def log_tail(path: Path) -> str:
    """The last lines of a log in one, each of bounded length; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return " | ".join([line.strip()[:_TAIL_LINE_CHARS] for line in lines if line.strip()][-_TAIL_LINES:])


def bound_logs(directory: Path, most_bytes: int = KEPT_BYTES) -> None:
    """Cut each log that is longer than `most_bytes` to its last `KEPT_BYTES`; a program may go on writing to it.

    What cannot be written, on a disk that has become read-only, stays as it is: that is not what ended the run.
    """
    for path in directory.rglob("*.log"):
        with contextlib.suppress(OSError), path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size <= most_bytes:
                continue
            file.seek(size - KEPT_BYTES)
            tail = file.read(KEPT_BYTES)
            # In place: programs append (O_APPEND), so they go on at the new end.
            file.seek(0)
            file.write(tail)
            file.truncate()
