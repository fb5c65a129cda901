"""The rollout of a training: a stream of groups that goes on in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.task_sources import TaskSource
from heddle_dask.live.driver.groups.group_stream import GroupStream
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.training.groups import FinishedGroup, GroupPlan

_POLL_S: Final = 0.02


class StreamFeed:
    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._stream: GroupStream | None = None
        self._pump: asyncio.Task[None] | None = None

    async def open(
        self,
        source: TaskSource,
        plan: GroupPlan,
        accepts: Callable[[FinishedGroup], bool],
        counted: int,
        on_begun: Callable[[str], None],
        on_dropped: Callable[[str], None],
    ) -> str:
        """Open the session of the rollout, and return its id; no task is taken before `open_batches`.

        Parameters
        ----------
        accepts
            Called for each finished group, as soon as enough of its members have ended.
        counted
            Groups that earlier processes accepted for a batch.
        on_begun, on_dropped
            Take the id of a group that begins, and of one that will not be delivered.
        """
        self._stream = self._rollout.stream_groups(source, plan, counts=accepts, counted=counted)
        self._stream.watch(on_begun, on_dropped)
        self._stream.open_batches(0)
        self._pump = asyncio.create_task(self._follow(self._stream))
        while self._rollout.session_id is None:
            await asyncio.wait({self._pump}, timeout=_POLL_S)
            if self._pump.done():
                self._pump.result()
        return self._rollout.session_id

    async def engines_there(self) -> None:
        """Wait until the rollout has its engines, or has failed (`follow` says how)."""
        assert self._pump is not None
        while not self._open.has_begun and not self._pump.done():
            await asyncio.wait({self._pump}, timeout=_POLL_S)

    async def _follow(self, stream: GroupStream) -> None:
        async for _ in stream:
            pass  # `accepts` has taken it already
        raise BadInput("the source of tasks has ended before the last training step: give more tasks or fewer steps")

    async def follow(self) -> None:
        """Wait for the end of the rollout, which comes only by an error."""
        assert self._pump is not None
        await asyncio.shield(self._pump)

    async def close(self) -> None:
        """End the rollout; what runs is left to a resumed training."""
        if self._pump is None or self._stream is None:
            return
        self._pump.cancel()
        await asyncio.wait({self._pump})
        await self._stream.aclose()

    def open_batches(self, through: int) -> None:
        """Take tasks until these batches are full."""
        self._open.open_batches(through)

    def replace_groups(self, groups: int) -> None:
        """Groups that were accepted are too old now: take tasks for others."""
        self._open.evicted(groups)

    @property
    def generated_tokens(self) -> int:
        """Tokens that ended trajectories of this process have sampled."""
        return self._open.generated_tokens

    @property
    def wasted_tokens(self) -> Mapping[str, int]:
        """Of them, those that no group was delivered with, by cause."""
        return self._open.wasted_tokens

    @property
    def mix_sampled(self) -> Mapping[str, int]:
        """Groups that were begun, by environment."""
        return self._open.mix_sampled

    @property
    def _open(self) -> GroupStream:
        assert self._stream is not None
        return self._stream
