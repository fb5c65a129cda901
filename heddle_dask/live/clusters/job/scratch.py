"""The scratch directory of one job, on its node: removed at its end, or by the next job of this user there."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.live.clusters.owned_directory import OwnedDirectory


@contextlib.contextmanager
def job_scratch(base: Path | None) -> Iterator[Path]:
    """A new directory of mode 0700 in `base`, or in the directory for temporary files.

    Raises
    ------
    BadInput
        It cannot be made there.
    """
    try:
        owned = OwnedDirectory("heddle-job-", base)
    except OSError as error:
        place = tempfile.gettempdir() if base is None else base
        raise BadInput(
            f"scratch {place} cannot be used ({error.strerror}): name a directory on this node with --scratch"
        ) from error
    with owned as path:
        yield path
