"""Calls of an API on a real cluster, against a real HTTP server that enforces its quota."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
from worlds.live_world import emulated, run
from worlds.shared_cluster import shared_cluster

from benchmarks.actions.api_server import ApiServer, api_server
from heddle_dask.apis.http_calls import http_call
from heddle_dask.core.errors import BadInput
from heddle_dask.core.needs import Needs
from heddle_dask.core.resources import ApiQuota, QuotaWindow
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.environments.api_errors import RateLimited, Retry
from heddle_dask.environments.base import ActionFailed, Context, Task
from heddle_dask.live.driver.inputs.pools import Pools
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.driver.rollout import Rollout

pytestmark = pytest.mark.cluster
# Workers cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SEARCH = Needs(api={"search": 1})


def refuses_in_a_process(retry_after_s: float) -> None:
    raise RateLimited("too many", retry_after_s=retry_after_s)


async def searches(ctx: Context, url: str, calls: int = 1) -> list[Any]:
    asked = (ctx.call(http_call, "GET", url, needs=SEARCH, label="search") for _ in range(calls))
    return [answer.json() for answer in await asyncio.gather(*asked)]


def rollout(client: Any, model: str, env: Any, quota: ApiQuota, notes: list[str], **retries: int) -> Rollout:
    return Rollout(
        client,
        env=env,
        model=model,
        engines=emulated(model),
        pools=Pools(quotas=[quota]),
        budget=Budget(retries=RetryPolicy(**retries)),
        progress=notes.append,
    )


def test_an_api_gets_no_call_over_its_quota_and_refusals_are_repeated_within_bounds(model_dir: str) -> None:
    notes: list[str] = []

    async def body() -> None:
        async with shared_cluster(engines=1) as client:

            async def play(
                env: Any,
                quota: ApiQuota,
                count: int = 1,
                then: Callable[[], None] = lambda: None,
                **retries: int,
            ) -> list[Any]:
                async with rollout(client, model_dir, env, quota, notes, **retries) as running:
                    batch = await running.run(count)
                then()
                return list(batch)

            await _a_quota_shared_by_trajectories(play)
            await _retry_after(play)
            await _breaker(play, notes)
            await _a_refusal_that_stays(play)
            await _undeclared(play)

    run(body())


async def _a_quota_shared_by_trajectories(play: Any) -> None:
    quota = ApiQuota("search", 4, (QuotaWindow(6, 0.5), QuotaWindow(20, 3.0)))
    async with api_server(quota) as server:

        async def solve(task: Task, ctx: Context) -> float:
            return float(len(await searches(ctx, server.url, 8)))

        records = await play(solve, quota, 3)
        assert [record.reward for record in records] == [8.0] * 3
        assert server.statuses == [200] * 24, "none was rejected"
        assert server.most_under_way <= quota.concurrency
        assert len(set(server.keys)) == 24
        # 24 calls and at most 20 in 3 s: some have waited for the quota, and their records say so.
        waits = [action.quota_s for record in records for action in record.actions]
        assert max(waits) > 0 and all(action.queue_s + 1e-6 >= action.quota_s for action in records[0].actions)


async def _retry_after(play: Any) -> None:
    """429 with Retry-After: the whole API is left alone, and the program sees the result only."""
    quota = ApiQuota("search", backoff_s=0.01)
    async with api_server(quota, answers=lambda number: (429, "1") if number == 0 else (200, "")) as server:

        async def solve(task: Task, ctx: Context) -> float:
            first = await searches(ctx, server.url)
            return float(first[0]["found"])

        (record,) = await play(solve, quota)
        assert record.reward == 1.0 and server.statuses == [429, 200]
        assert server.begun_s[1] - server.begun_s[0] >= 1.0
        assert server.keys[0] == server.keys[1] != ""
        (action,) = record.actions
        # It counts from the moment when the controller hears of the refusal: on a busy machine that is late.
        assert action.status == "ok" and action.quota_s > 0


async def _breaker(play: Any, notes: list[str]) -> None:
    """A server that fails: the breaker opens, lets a probe through, and closes; the user is told."""
    quota = ApiQuota("search", backoff_s=0.01, max_backoff_s=0.02, failures_to_open=3, open_s=0.3)
    async with api_server(quota, answers=lambda number: (503, "") if number < 4 else (200, "")) as server:

        async def solve(task: Task, ctx: Context) -> float:
            return float(len(await searches(ctx, server.url)))

        notes.clear()
        (record,) = await play(solve, quota, max_call_attempts=10)
        assert record.reward == 1.0, record.detail
        # Three failures open it; one probe fails; the next one closes it.
        assert server.statuses[:4] == [503] * 4 and set(server.statuses[4:]) == {200}
        told = [note for note in notes if note.startswith("api search")]
        assert [note.split(":")[1].split(" for ")[0] for note in told] == [
            " circuit breaker open",
            " circuit breaker open",
            " circuit breaker closed",
        ]
        assert server.begun_s[3] - server.begun_s[2] >= 0.29, "nothing passes while it is open"


async def _a_refusal_that_stays(play: Any) -> None:
    quota = ApiQuota("search", backoff_s=0.01, max_backoff_s=0.02, failures_to_open=100)

    async def solve(task: Task, ctx: Context) -> float:
        causes = []
        for function, args in ((refuses_in_a_process, (0.01,)), (_fails, ())):
            try:
                await ctx.call(function, *args, needs=SEARCH)
            except ActionFailed as failure:
                causes.append((failure.cause, str(failure)))
        ctx.metadata["causes"] = causes
        return 1.0

    (record,) = await play(solve, quota, max_call_attempts=3)
    (limited, failed) = record.metadata["causes"]
    assert limited[0] == "rate-limited" and limited[1].endswith("RateLimited: too many (3 calls: max_call_attempts)")
    assert failed[0] == "unavailable" and "Retry: down (3 calls: max_call_attempts)" in failed[1]
    assert [action.status for action in record.actions] == ["rate-limited", "unavailable"]


async def _fails() -> None:
    raise Retry("down")


async def _undeclared(play: Any) -> None:
    async def solve(task: Task, ctx: Context) -> float:
        messages = []
        for needs in (Needs(api={"pages": 1}), Needs(api={"search": 3})):
            try:
                await ctx.call(max, 1, 2, needs=needs)
            except BadInput as error:
                messages.append(str(error))
        ctx.metadata["messages"] = messages
        return 1.0

    (record,) = await play(solve, ApiQuota("search", 2))
    assert record.metadata["messages"] == [
        "api 'pages' is not declared: add it to Pools(quotas=…) (declared: search)",
        "needs: 3 calls of api search at once; its quota allows 2 calls of api search",
    ]


def test_the_server_of_these_tests_rejects_what_is_over_its_quota() -> None:
    async def body() -> None:
        quota = ApiQuota("search", 0, (QuotaWindow(2, 30.0),))
        async with api_server(quota, latency_s=0.0) as server:
            await _expect_rejection(server)

    run(body(), 120)


async def _expect_rejection(server: ApiServer) -> None:
    for _ in range(2):
        assert (await http_call("GET", server.url)).status == 200
    with pytest.raises(RateLimited) as refused:
        await http_call("GET", server.url)
    assert refused.value.retry_after_s == 1.0 and server.rejected == 1
