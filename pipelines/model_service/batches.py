"""Requests that wait run together: each pass of the model takes as many as there are, up to the limit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Value = TypeVar("Value")
Pass = Callable[[Sequence[Sequence[int]]], Sequence[Any]]


class Batches:
    """Runs inputs in batches, one batch at a time; loads and evictions wait for the batch that runs.

    Parameters
    ----------
    run
        One pass over a batch of token ids: one answer for each.
    """

    def __init__(self, run: Pass, limit: int) -> None:
        self._run = run
        self._limit = limit
        self._waiting: deque[tuple[Sequence[int], asyncio.Future[Any]]] = deque()
        self._alone = asyncio.Lock()
        # One thread: PyTorch is not slowed by the event loop, and two passes never overlap.
        self._thread = ThreadPoolExecutor(1)
        self._turn: asyncio.Task[None] | None = None
        self.passes = 0

    async def answers(self, inputs: Sequence[Sequence[int]]) -> list[Any]:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in inputs]
        self._waiting.extend(zip(inputs, futures, strict=True))
        if self._turn is None or self._turn.done():
            self._turn = asyncio.create_task(self._take_turns())
        return list(await asyncio.gather(*futures))

    async def _take_turns(self) -> None:
        while self._waiting:
            async with self._alone:
                taken = [self._waiting.popleft() for _ in range(min(self._limit, len(self._waiting)))]
                # Of similar length: a pass costs what its longest input costs, for each.
                batch = [tokens for tokens, _ in taken]
                try:
                    answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._run, batch)
                except Exception as error:
                    for _, future in taken:
                        if not future.done():
                            future.set_exception(error)
                    continue
                self.passes += 1
                for (_, future), answer in zip(taken, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)

    async def between_passes(self, function: Callable[[], Value]) -> Value:
        async with self._alone:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)
