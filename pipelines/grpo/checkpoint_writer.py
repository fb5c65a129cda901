"""Writes checkpoints while training goes on: one at a time, every so many seconds, and when asked."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import WriteFailed
from pipelines.grpo.checkpoint_folder import CheckpointFolder, CheckpointRecord
from pipelines.grpo.checkpoint_state import FAILURES, last_line


class CheckpointWriter:
    """Belongs to the first rank, and to one thread."""

    def __init__(self, folder: CheckpointFolder, every_s: float) -> None:
        self._folder = folder
        self._every_s = every_s
        self._began_s = time.monotonic()
        self._completing = ThreadPoolExecutor(1)
        self._running: Future[Path] | None = None

    def is_due(self) -> bool:
        is_busy = self._running is not None and not self._running.done()
        return not is_busy and time.monotonic() - self._began_s >= self._every_s

    def begins(self, record: CheckpointRecord, written: Future[Any]) -> None:
        """All ranks write into `CheckpointFolder.begin`; it is complete when they have.

        Parameters
        ----------
        written
            Ends when all have.
        """
        self._began_s = time.monotonic()
        self._running = self._completing.submit(self._complete, record, written)

    def _complete(self, record: CheckpointRecord, written: Future[Any]) -> Path:
        try:
            written.result()
        except FAILURES as error:
            raise WriteFailed(f"checkpoint {record.version} cannot be written: {last_line(error)}") from None
        return self._folder.complete(record)

    def wait(self) -> None:
        """Until the one that is being written is complete.

        Raises
        ------
        WriteFailed
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def check(self) -> None:
        """Raise what the latest one failed of."""
        if self._running is not None and self._running.done():
            self.wait()
