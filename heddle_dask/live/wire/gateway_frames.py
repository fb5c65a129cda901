"""Frames between a gateway process and its tool worker: msgpack behind its length, over a pair of Unix sockets.

Known to both ends, and knows nothing of Dask: a gateway process starts in half the time without it.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgpack

_LENGTH = struct.Struct("!I")
BUFFER_BYTES = 4 << 20
"""Of a stream's buffer: a long conversation comes in few pieces."""

# To the worker.
READY, ORDER, CANCEL = "ready", "order", "cancel"
# From the worker.
ANSWER, TEXT, SESSION_ENDED = "answer", "text", "ended"


def write_frame(writer: asyncio.StreamWriter, *values: Any) -> None:
    """Send a frame; its first value says of which kind it is. Dropped where the other end has gone."""
    if not writer.is_closing():
        body = msgpack.packb(values)
        writer.write(_LENGTH.pack(len(body)))
        writer.write(body)


async def read_frame(reader: asyncio.StreamReader) -> list[Any] | None:
    """The next frame; None when the other end has gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        frame: list[Any] = msgpack.unpackb(await reader.readexactly(length))
        return frame
    except (OSError, asyncio.IncompleteReadError):
        return None
