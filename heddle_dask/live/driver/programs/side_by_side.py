"""Waiting for several coroutines, of which one that fails cancels the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence


async def side_by_side(coroutines: Sequence[Coroutine[None, None, None]]) -> None:
    """Wait until all have ended; the first failure, and a cancellation, cancels the others and awaits them."""
    if len(coroutines) == 1:
        await coroutines[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
