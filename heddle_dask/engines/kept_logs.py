"""Logs of engines that did not start, kept where the end of their owner does not remove them."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.address import engines_directory, private_directory

KEPT = 20
"""The newest so many stay."""


def kept_log(log: Path, mark: str) -> Path:
    """Where the log will be found: a copy, if it lies among temporary files, which go with a cluster or a job."""
    if not log.resolve().is_relative_to(Path(tempfile.gettempdir()).resolve()):
        return log
    try:
        directory = private_directory(engines_directory() / "failed-starts")
        copy = directory / f"{time.strftime('%Y%m%d-%H%M%S')}-{mark}.log"
        shutil.copyfile(log, copy)
        for old in sorted(directory.glob("*.log"))[:-KEPT]:
            old.unlink(missing_ok=True)
    except (OSError, BadInput):
        return log
    return copy
