"""One output stream of a command: its beginning and its end are kept, the middle of a long one is left out."""

from __future__ import annotations

import asyncio
from collections import deque

_CHUNK_BYTES = 1 << 16


class KeptOutput:
    """Takes all bytes of a stream and keeps at most `most_bytes` of them.

    Attributes
    ----------
    head
        The first bytes: half of the limit.
    left_out
        Bytes between the beginning and the end that are not kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self.head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._most_head = most_bytes // 2
        self._most_tail = most_bytes - self._most_head
        self.left_out = 0

    def take(self, chunk: bytes) -> None:
        """Add bytes at the end."""
        room = self._most_head - len(self.head)
        self.head += chunk[:room]
        rest = chunk[room:] if room < len(chunk) else b""
        if rest:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
        while self._tail_bytes > self._most_tail:
            first = self._tail.popleft()
            cut = min(len(first), self._tail_bytes - self._most_tail)
            self.left_out += cut
            self._tail_bytes -= cut
            if cut < len(first):
                self._tail.appendleft(first[cut:])

    async def read_from(self, stream: asyncio.StreamReader) -> None:
        """Take the whole stream."""
        while chunk := await stream.read(_CHUNK_BYTES):
            self.take(chunk)

    @property
    def text(self) -> str:
        """What is kept, with a line in place of the rest."""
        tail = b"".join(self._tail)
        if not self.left_out:
            return (bytes(self.head) + tail).decode("utf-8", "replace")
        gap = f"\n[... {self.left_out:,} bytes left out ...]\n"
        return bytes(self.head).decode("utf-8", "replace") + gap + tail.decode("utf-8", "replace")
