"""Results that workers push to the driver: what arrives, what does not, and what is never waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from worlds.dask_cluster import with_cluster

from heddle_dask.core.ids import ActionId
from heddle_dask.live.wire import result_push
from heddle_dask.live.wire.messages import ActionOutcome, action_key
from heddle_dask.live.wire.result_push import KEPT_SESSIONS, Inbox, Outbox
from heddle_dask.live.wire.transport import Handlers
from heddle_dask.live.wire.worker_messages import (
    ActionResults,
    FetchActionResults,
    FetchStepResults,
    PushedAction,
)


def pushed(name: str, value: int = 0) -> PushedAction:
    return PushedAction(ActionId(name), ActionOutcome("ok", bytes([value])))


def test_a_result_waits_for_the_poll_and_is_given_once() -> None:
    async def body() -> None:
        outbox: Outbox[PushedAction] = Outbox()
        outbox.put("s", pushed("a", 1))
        outbox.put("s", pushed("b", 2))
        assert await outbox.take("s") == (pushed("a", 1), pushed("b", 2))
        polled = asyncio.ensure_future(outbox.take("s"))
        await asyncio.sleep(0.01)
        assert not polled.done()
        outbox.put("s", pushed("c", 3))
        assert await polled == (pushed("c", 3),)

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_poll_without_results_is_answered_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_push, "POLL_S", 0.01)
    outbox: Outbox[PushedAction] = Outbox()
    assert asyncio.run(asyncio.wait_for(outbox.take("s"), 60)) == ()


def test_a_driver_that_never_polls_costs_a_bounded_number_of_results() -> None:
    async def body() -> None:
        outbox: Outbox[PushedAction] = Outbox()
        for number in range(result_push.KEPT_RESULTS + 50):
            outbox.put("s", pushed(str(number)))
        kept = await outbox.take("s")
        assert len(kept) == result_push.KEPT_RESULTS
        assert kept[-1] == pushed(str(result_push.KEPT_RESULTS + 49))

    asyncio.run(asyncio.wait_for(body(), 60))


def test_sessions_side_by_side_keep_their_results_and_silent_ones_are_dropped() -> None:
    async def body() -> None:
        outbox: Outbox[PushedAction] = Outbox()
        outbox.put("gone", pushed("a"))
        for number in range(KEPT_SESSIONS - 1):
            outbox.put(f"s{number}", pushed("b"))
        outbox.put("gone", pushed("c"))
        outbox.put("new", pushed("d"))
        assert await outbox.take("gone") == (pushed("a"), pushed("c")), "s0 was silent for longer"
        assert await outbox.take("s1") == (pushed("b"),)
        outbox.put("s0", pushed("e"))
        assert await outbox.take("s0") == (pushed("e"),)

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.cluster
def test_an_inbox_keeps_what_is_expected_and_survives_its_worker() -> None:
    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        (worker,) = workers
        outbox: Outbox[PushedAction] = Outbox()

        async def results(request: FetchActionResults) -> ActionResults:
            return ActionResults(await outbox.take(request.session))

        handlers = Handlers(lambda session, failure: unexpected.append(failure))
        handlers.answer(FetchActionResults, results)
        handlers.add_to(worker)
        unexpected: list[Any] = []
        inbox = Inbox(client, "s", lambda key, result: unexpected.append((key, result)))
        inbox.listen(worker.address, FetchActionResults)
        inbox.listen(worker.address, FetchActionResults)
        assert inbox.listens(FetchActionResults) and not inbox.listens(FetchStepResults)
        inbox.expect(action_key("s", "a"))
        arrival = inbox.arrival(action_key("s", "a"))
        outbox.put("s", pushed("unknown", 2))
        outbox.put("s", pushed("a", 1))
        assert await asyncio.wait_for(arrival, 60) == pushed("a", 1).result
        assert unexpected == [(action_key("s", "unknown"), pushed("unknown", 2).result)]
        inbox.forget(action_key("s", "a"))

        inbox.listen("tcp://127.0.0.1:1", FetchActionResults)
        for _ in range(1200):
            if not any(address.endswith(":1") for address, _ in inbox._polls):
                break
            await asyncio.sleep(0.05)
        assert inbox.listens(FetchActionResults), "a worker that is gone ends its own poll only"
        await inbox.close()
        assert not inbox.listens(FetchActionResults)

    with_cluster(body)
