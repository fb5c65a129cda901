"""The stream of finished groups: rollout goes on in the background while the consumer works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from heddle_dask.live.driver.groups.group_feed import GroupFeed
from heddle_dask.training.groups import FinishedGroup


class GroupStream:
    """An async iterator of groups; close it (`aclose`) or exhaust it.

    Parameters
    ----------
    feed
        Its groups.
    roll_out
        Runs the attempts of the feed until it is exhausted; calls what it is given when a group is finished.
    interrupt
        Ends the rollout; what runs is left to a resumed run.
    """

    def __init__(
        self,
        feed: GroupFeed,
        roll_out: Callable[[GroupFeed, Callable[[], None]], Coroutine[Any, Any, None]],
        interrupt: Callable[[], bool],
    ) -> None:
        self._feed = feed
        self._roll_out = roll_out
        self._interrupt = interrupt
        self._pump: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def open_batches(self, through: int) -> None:
        """Let groups start until the batches 1 to `through` are full; before the first call, without a bound."""
        self._feed.open_batches(through)

    def watch(self, on_begun: Callable[[str], None], on_dropped: Callable[[str], None]) -> None:
        """Call these with the id of each group that begins, and of each that will not be delivered."""
        self._feed.on_begun, self._feed.on_dropped = on_begun, on_dropped

    def evicted(self, groups: int) -> None:
        """So many groups that counted have become useless, since they are too old: others replace them."""
        self._feed.evicted(groups)

    @property
    def has_begun(self) -> bool:
        """Whether engines are there, and tasks are taken."""
        return self._feed.is_connected

    @property
    def mix_sampled(self) -> Mapping[str, int]:
        """Groups that were begun, by environment."""
        return dict(self._feed.mix_sampled)

    @property
    def mix_consumed(self) -> Mapping[str, int]:
        """Groups that counted for a batch, by environment."""
        return dict(self._feed.mix_consumed)

    @property
    def generated_tokens(self) -> int:
        """Tokens that the trajectories that have ended in this session had sampled."""
        return self._feed.generated_tokens

    @property
    def wasted_tokens(self) -> Mapping[str, int]:
        """Of them, those that no delivered member has, by cause."""
        return dict(self._feed.ledger.wasted_tokens)

    @property
    def dropped_groups(self) -> Mapping[str, int]:
        """Groups that were not delivered, by cause; ``given up``: stale ones whose task is not asked for again."""
        ledger = self._feed.ledger
        return {**ledger.dropped, **({"given up": ledger.given_up} if ledger.given_up else {})}

    def __aiter__(self) -> GroupStream:
        return self

    async def __anext__(self) -> FinishedGroup:
        if self._pump is None:
            self._pump = asyncio.create_task(self._roll_out(self._feed, self._changed.set))
        self._feed.confirm()
        while not self._feed.finished:
            if self._pump.done():
                self._pump.result()
                raise StopAsyncIteration
            self._changed.clear()
            waiting = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({waiting, self._pump}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
        return self._feed.take()

    async def aclose(self) -> None:
        """End the rollout. What has begun is left to a resumed run, where there is a store.

        Raises
        ------
        WriteFailed, ControlPlaneFailed
            The rollout has failed, and no iteration has said so.
        """
        if self._pump is None:
            return
        self._feed.confirm()
        if not self._pump.done() and not self._interrupt():
            self._pump.cancel()  # it is still starting
        await asyncio.wait({self._pump})
        if not self._pump.cancelled():
            self._pump.result()
