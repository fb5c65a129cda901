"""What the process of a plain function prints: passed on to the log of its worker, and its end kept."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

KEPT_BYTES = 64 << 10
_CHUNK_BYTES = 64 << 10
# Read at the end of a call, which may print without end meanwhile: as much as a pipe holds.
_LAST_CHUNKS = 32


class Printed:
    """The worker's end of one process's standard output and error; the process has `write_end`."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._kept = bytearray()
        self._dropped = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_end, self._take)

    def close_write_end(self) -> None:
        """The process has its own copy."""
        os.close(self.write_end)

    def begin(self) -> None:
        """A call begins: what was printed before is not its own."""
        self.end()

    def end(self) -> str:
        """The end of what the call has printed; begins anew."""
        for _ in range(_LAST_CHUNKS):
            if not self._take():
                break
        text = self._kept.decode("utf-8", "replace")
        if self._dropped:
            text = f"[… only the last {KEPT_BYTES:,} bytes]\n{text}"
        self._kept.clear()
        self._dropped = False
        return text

    def close(self) -> None:
        if self._read_end >= 0:
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)
            self._read_end = -1

    def _take(self) -> bool:
        """Read once; whether there may be more."""
        if self._read_end < 0:
            return False
        try:
            chunk = os.read(self._read_end, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self.close()
            return False
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        self._kept += chunk
        if len(self._kept) > KEPT_BYTES:
            del self._kept[:-KEPT_BYTES]
            self._dropped = True
        return True
