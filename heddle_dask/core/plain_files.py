"""Files that others may have written: only regular ones are opened, and no more is read than was said."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from heddle_dask.core.errors import BadInput

MOST_JSON_BYTES = 256 << 20
"""Largest JSON file or line that is read; what a run says of itself is below a megabyte."""


def open_plain(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a file to read; `OSError` if it is no regular one: a FIFO would hang, and a device has no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(descriptor, "rb", buffering=buffering)


def plain_lines(file: BinaryIO, most_bytes: int = MOST_JSON_BYTES) -> Iterator[bytes]:
    """The lines of an open file; `OSError` at one longer than `most_bytes`, which a small packed file can have."""
    while line := file.readline(most_bytes + 1):
        if len(line) > most_bytes:
            raise OSError(errno.EFBIG, f"a line is longer than {most_bytes:,} bytes")
        yield line


def read_plain(path: Path, most_bytes: int = MOST_JSON_BYTES) -> bytes:
    """The content of a file; `OSError` as `open_plain`, or if it is larger than `most_bytes`."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {most_bytes:,} bytes", str(path))
        return file.read(size)


def damaged(where: str | Path, why: str) -> BadInput:
    """The error for a part of a run that is not what was written there."""
    return BadInput(f"the run is damaged at {where}: {why}: restore it from a copy")
