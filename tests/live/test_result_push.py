"""Results that workers push to the driver: what arrives, what does not, and what is never waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from worlds.dask_cluster import with_cluster

from heddle_dask.live.wire import _dask_internals as internals
from heddle_dask.live.wire import result_push
from heddle_dask.live.wire.messages import Key, action_key
from heddle_dask.live.wire.result_push import Inbox, Outbox


def key(name: str) -> Key:
    return action_key("s", name)


async def taken(outbox: Outbox, session: str = "s") -> list[Any]:
    return list((await outbox.take(session))["results"].data)


def test_a_result_waits_for_the_question_and_is_given_once() -> None:
    async def body() -> None:
        outbox = Outbox()
        outbox.put("s", key("a"), 1)
        outbox.put("s", key("b"), 2)
        assert await taken(outbox) == [(key("a"), 1), (key("b"), 2)]
        asked = asyncio.ensure_future(taken(outbox))
        await asyncio.sleep(0.01)
        assert not asked.done()
        outbox.put("s", key("c"), 3)
        assert await asked == [(key("c"), 3)]

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_question_without_news_is_answered_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_push, "POLL_S", 0.01)
    assert asyncio.run(asyncio.wait_for(taken(Outbox()), 60)) == []


def test_a_driver_that_never_asks_costs_a_bounded_number_of_results() -> None:
    async def body() -> None:
        outbox = Outbox()
        for number in range(result_push.KEPT_RESULTS + 50):
            outbox.put("s", key(str(number)), number)
        kept = await taken(outbox)
        assert len(kept) == result_push.KEPT_RESULTS
        assert kept[-1] == (key(str(result_push.KEPT_RESULTS + 49)), result_push.KEPT_RESULTS + 49)

    asyncio.run(asyncio.wait_for(body(), 60))


def test_results_of_a_session_before_are_dropped() -> None:
    async def body() -> None:
        outbox = Outbox()
        outbox.put("old", key("a"), 1)
        outbox.put("s", key("b"), 2)
        assert await taken(outbox) == [(key("b"), 2)]
        outbox.put("old", key("c"), 3)
        assert await taken(outbox, "old") == [(key("c"), 3)]

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.cluster
def test_an_inbox_keeps_what_is_expected_and_survives_its_worker() -> None:
    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        (worker,) = workers
        outbox = Outbox()
        internals.add_worker_handlers(worker, rpc={"probe_results": outbox.take}, stream={})
        inbox = Inbox(client, "s")
        inbox.listen(worker.address, "probe_results")
        inbox.listen(worker.address, "probe_results")
        assert inbox.listens("probe_results") and not inbox.listens("other")
        inbox.expect(key("a"))
        arrival = inbox.arrival(key("a"))
        outbox.put("s", key("unknown"), 0)
        outbox.put("s", key("a"), {"any": {"type"}})
        assert await asyncio.wait_for(arrival, 60) == {"any": {"type"}}
        inbox.forget(key("a"))

        inbox.listen("tcp://127.0.0.1:1", "probe_results")
        for _ in range(1200):
            if not any(address.endswith(":1") for address, _ in inbox._polls):
                break
            await asyncio.sleep(0.05)
        assert inbox.listens("probe_results"), "a worker that is gone ends its own question only"
        await inbox.close()
        assert not inbox.listens("probe_results")

    with_cluster(body)
