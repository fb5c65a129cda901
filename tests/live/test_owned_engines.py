"""Engines of a driver that has died: they end after a while, unless another driver takes them over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from heddle_dask.live.scheduler.owned_engines import OwnedEngines

LONG_S = 3600.0


def with_engines(body: Callable[[OwnedEngines, asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        before = asyncio.all_tasks()
        ended = asyncio.Event()

        async def end() -> None:
            ended.set()

        owned = OwnedEngines(end)
        await body(owned, ended)
        owned.close()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before, "nothing waits any more"

    asyncio.run(asyncio.wait_for(run(), 60))


def test_they_end_when_their_owner_has_died_and_only_then() -> None:
    async def body(owned: OwnedEngines, ended: asyncio.Event) -> None:
        owned.own("driver", 0.01)
        owned.client_left("somebody else")
        await asyncio.sleep(0.05)
        assert not ended.is_set()
        owned.client_left("driver")
        await ended.wait()

    with_engines(body)


def test_a_driver_that_joins_in_time_inherits_them_and_its_death_counts() -> None:
    async def body(owned: OwnedEngines, ended: asyncio.Event) -> None:
        owned.own("first", LONG_S)
        owned.client_joined("second")
        assert not owned.inherited, "their owner lives"
        owned.client_left("first")
        owned.client_joined("second")
        assert owned.inherited
        owned.own("second", 0.01)
        assert not owned.inherited and not ended.is_set()
        owned.client_left("second")
        await ended.wait()

    with_engines(body)


def test_engines_end_once_and_a_session_that_begins_meanwhile_waits_for_that() -> None:
    async def body(_: OwnedEngines, __: asyncio.Event) -> None:
        calls: list[str] = []
        may_end = asyncio.Event()

        async def end() -> None:
            calls.append("end")
            await may_end.wait()

        owned = OwnedEngines(end)
        await owned.ended()
        owned.own("driver", LONG_S)
        owned.end()
        owned.end()
        waits = asyncio.ensure_future(owned.ended())
        await asyncio.sleep(0.01)
        assert calls == ["end"] and not waits.done() and owned.is_owner("driver")
        owned.client_left("driver")
        may_end.set()
        await waits
        assert not owned.is_owner("driver")

    with_engines(body)


def test_released_engines_are_left_alone() -> None:
    async def body(owned: OwnedEngines, ended: asyncio.Event) -> None:
        owned.own("driver", 0.01)
        owned.release()
        owned.client_left("driver")
        await asyncio.sleep(0.05)
        assert not ended.is_set()

    with_engines(body)
