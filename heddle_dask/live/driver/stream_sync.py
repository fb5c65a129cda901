"""An async iterator of trajectories or groups as a plain one, for a client that is not asynchronous."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")


def stream_sync(sync: Callable[..., Any], stream: AsyncIterator[Item]) -> Iterator[Item]:
    """Yield what the stream yields.

    Parameters
    ----------
    sync
        Runs a coroutine function on the client's loop and returns its result.
    """
    while True:
        record = sync(_next_or_none, stream)
        if record is None:
            return
        yield record


async def _next_or_none(stream: AsyncIterator[Item]) -> Item | None:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return None
