"""Long prompts leave in several graphs, in order, none larger than need be; a lost result is lost alone."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from hypothesis import given
from hypothesis import strategies as st
from worlds.dask_cluster import with_cluster

from heddle_dask.core.ids import ActionId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest
from heddle_dask.live.driver.connection.submission import GRAPH_BYTES, Interrupted, Submitter, _parts, _Row
from heddle_dask.live.wire.messages import ActionCall, Submission, action_key
from heddle_dask.live.wire.worker_messages import FetchActionResults

REQUEST = Submission(ActionRequest(ActionId("a"), TrajectoryId("t"), "tool", "name"))


@given(st.lists(st.integers(0, 2 * GRAPH_BYTES), min_size=1, max_size=12))
def test_parts_are_small_and_hold_everything_in_order(sizes: list[int]) -> None:
    rows = [
        _Row(ActionCall("s", str(number), bytes(size), None, str(number)), REQUEST) for number, size in enumerate(sizes)
    ]
    parts = list(_parts(rows))
    assert [row for part in parts for row in part] == rows
    for part in parts:
        assert part
        assert len(part) == 1 or sum(row.call.body_bytes for row in part) <= GRAPH_BYTES
    for one, following in pairwise(parts):
        together = sum(row.call.body_bytes for row in one) + following[0].call.body_bytes
        assert together > GRAPH_BYTES, "the next would have fitted"


@pytest.mark.cluster
def test_a_result_that_is_lost_while_it_is_fetched_leaves_the_others_alone() -> None:
    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        keys = [action_key("s", name) for name in ("lost", "late")]
        futures = [client.submit(str.upper, key[2], key=key, pure=False) for key in keys]
        await asyncio.gather(*futures)
        asked, may_answer = asyncio.Event(), asyncio.Event()
        handler = scheduler.handlers["who_has"]

        async def slow(*arguments: Any, **more: Any) -> Any:
            asked.set()
            await may_answer.wait()
            return await answer if asyncio.iscoroutine(answer := handler(*arguments, **more)) else answer

        scheduler.handlers["who_has"] = slow
        submitter = Submitter(client, "s")
        for key in keys:
            submitter._inbox.expect(key)
        results = [
            asyncio.ensure_future(submitter._result(key, future, FetchActionResults))
            for key, future in zip(keys, futures, strict=True)
        ]
        await asked.wait()
        submitter.interrupt(keys[0], "result-lost", "its worker died")
        with pytest.raises(Interrupted, match="its worker died"):
            await results[0]
        may_answer.set()
        assert await results[1] == "LATE"
        await submitter.close()

    with_cluster(body)
