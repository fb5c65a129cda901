"""Output of a process that outlives its readers: what cannot be encoded is escaped, and a closed pipe takes no more."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

_GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe, or the terminal


class _LastingFile(io.FileIO):
    """A descriptor for output; when its reader has gone, it becomes the null device."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in _GONE:
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return memoryview(data).nbytes


def keep_output_alive() -> None:
    """Let no print of this process raise for its locale or for a reader that has gone.

    A stream that was put in the place of stdout or stderr only escapes.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__") and _is_plain(stream):
            setattr(sys, name, _lasting(stream))
        elif isinstance(stream, io.TextIOWrapper) and not isinstance(_raw(stream), _LastingFile):
            stream.reconfigure(errors="backslashreplace")


def _raw(stream: Any) -> Any:
    """What is below its buffer; Python's ``-u`` leaves the buffer out."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def _is_plain(stream: Any) -> bool:
    return type(stream) is io.TextIOWrapper and type(_raw(stream)) is io.FileIO


def _lasting(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    stream.flush()
    raw = _LastingFile(stream.fileno(), "w", closefd=False)
    is_buffered = isinstance(stream.buffer, io.BufferedWriter)
    return io.TextIOWrapper(
        io.BufferedWriter(raw) if is_buffered else raw,
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
