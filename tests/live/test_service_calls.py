"""What programs ask of model services, checked before anything is sent; and the order in which a host obeys."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from worlds.model_files import AGENT, classifier
from worlds.scripted_plane import ScriptedPlane, context_on, sampled

from heddle_dask import ActionFailed, ApiQuota, BadInput, Needs, Pools, QuotaWindow, RemoteModel, ServiceSpec
from heddle_dask.core.gpu_chunks import GpuChunk
from heddle_dask.core.ids import GroupId, TrajectoryId
from heddle_dask.core.nouns import TrajectorySpec
from heddle_dask.live.driver.programs.branch import Recorded
from heddle_dask.live.driver.programs.context import LiveContext
from heddle_dask.live.driver.runs.reward_runs import LiveRewardContext
from heddle_dask.live.wire.messages import ActionOutcome
from heddle_dask.live.worker.service_worker import ChunkOrders


async def uses_service(text: str, service: Any) -> None:
    """An action that calls a service."""


def declared(tmp_path: Path) -> Pools:
    reward = ServiceSpec("rm", classifier(tmp_path / "rm"), "cpu", gpus=(1, 2))
    return Pools(services=[reward, ServiceSpec("teacher", AGENT, "cpu")])


def context(plane: ScriptedPlane, tmp_path: Path, journal: list[Any] | None = None) -> LiveContext:
    return context_on(plane, str(AGENT), pools=declared(tmp_path), journal=journal)


def answer(value: Any) -> ActionOutcome:
    return ActionOutcome("ok", cloudpickle.dumps(value), run_s=0.1)


def test_requests_are_actions_with_the_service_in_their_needs(tmp_path: Path) -> None:
    plane = ScriptedPlane(sampled(65, 66))
    journal: list[Any] = []
    ctx = context(plane, tmp_path, journal)
    plane.outcomes = [answer([0.5]), answer([-1.0, -2.0]), answer([0.25, 0.75])]

    async def body() -> None:
        ctx.append("user", "hello")
        await ctx.generate()
        assert await ctx.score("rm") == [0.5]
        assert await ctx.logprobs("teacher", start=ctx.context_tokens - 2) == [-1.0, -2.0]
        assert await ctx.score("rm", ["a", [1, 2]], gpus={1, 2}, kind="tool") == [0.25, 0.75]

    asyncio.run(body())
    first, second, third = plane.actions
    assert [call.service for call in plane.actions] == ["rm", "teacher", "rm"]
    assert (first.pool, first.kind, first.label) == ("gpu", "reward", "score:rm")
    assert (second.label, third.kind) == ("logprobs:teacher", "tool")
    assert third.demand["gpus"].only == (1, 2)
    _, (given,), _ = cloudpickle.loads(plane.payloads[0])
    assert given == [ctx.record.token_ids.tolist()]
    _, (ids, start), _ = cloudpickle.loads(plane.payloads[1])
    assert (ids, start) == (ctx.record.token_ids.tolist(), len(ids) - 2)
    values = [body["value"] for kind, body in journal if kind == "action"]
    assert values == [[0.5], [-1.0, -2.0], [0.25, 0.75]]


def test_a_judge_is_a_service_of_the_cluster_or_an_api_with_a_quota(tmp_path: Path) -> None:
    plane = ScriptedPlane(sampled(65, 66))
    journal: list[Any] = []
    remote = RemoteModel("far", "https://api.invalid/v1", "large", "FAR_KEY")
    quota = ApiQuota("far", windows=(QuotaWindow(5000, 60, "tokens"),))
    pools = Pools(services=[ServiceSpec("near", AGENT, "cpu"), remote], quotas=[quota])
    ctx = context_on(plane, str(AGENT), pools=pools, journal=journal)
    reply = {"content": "Score: 1", "finish_reason": "stop"}
    plane.outcomes = [answer(reply), answer(reply), answer({**reply, "content": "Hm"})]

    async def body() -> None:
        assert await ctx.judge("near", "Is it?", gpus=1) == 1.0
        assert await ctx.judge("far", "x" * 1000, max_tokens=100, temperature=0.5) == 1.0
        with pytest.raises(ActionFailed, match="judge far: its reply has no verdict: 'Hm'"):
            await ctx.judge("far", "Is it?")
        with pytest.raises(BadInput, match="5019 tokens of api far at once; its quota allows 5000 tokens"):
            await ctx.judge("far", "Is it?", max_tokens=5000)
        with pytest.raises(BadInput, match=r"score: service far has a model for judge: use ctx\.judge"):
            await ctx.score("far", ["a"])
        with pytest.raises(BadInput, match="service far is remote"):
            await ctx.call(uses_service, "a", needs=Needs(service="far"))

    asyncio.run(body())
    near, far, _ = plane.actions
    assert (near.service, near.label, near.pool, near.kind) == ("near", "judge:near", "gpu", "reward")
    assert (far.service, far.label, far.pool) == ("", "judge:far", "cpu")
    assert dict(far.demand.least) == {"api:far": 1, "api:far#tokens": 16 + 500 + 100}
    bodies = [body for kind, body in journal if kind == "action"]
    assert all("value" in body for body in bodies), "plain data, that a resumed run reads"
    assert Pools(services=[remote]).quotas == (ApiQuota("far"),)
    assert [each.name for each in pools.hosted] == ["near"] and len(pools.declared_services) == 1


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        (
            "score",
            ("judge", ["a"]),
            r"service 'judge' is not declared: add it to Pools\(services=…\) .*rm, teacher",
        ),
        ("score", ("teacher", ["a"]), "service teacher has a model for logprobs"),
        ("logprobs", ("rm", [1, 2]), "service rm has a model for score"),
        ("score", ("rm", "a text"), "inputs is 'a text': use a list of texts"),
        ("score", ("rm", []), "use a list of texts"),
        ("score", ("rm", [[]]), r"an input is \[\]"),
        ("score", ("rm", [[1, "a"]]), "use a text or a list of token ids"),
        ("score", ("rm", [[True]]), "use a text or a list of token ids"),
        ("logprobs", ("teacher", "text"), "token_ids is 'text'"),
        ("logprobs", ("teacher", [1]), "start is 1"),
    ],
)
def test_a_request_that_cannot_be_is_refused_before_it_is_sent(
    method: str, given: tuple[Any, ...], message: str, tmp_path: Path
) -> None:
    plane = ScriptedPlane()
    ctx = context(plane, tmp_path)
    with pytest.raises(BadInput, match=message) as raised:
        asyncio.run(getattr(ctx, method)(*given))
    assert "\n" not in str(raised.value) and plane.action_ids == []


def test_the_hook_of_a_reward_has_the_same_calls_and_each_is_a_reward(tmp_path: Path) -> None:
    plane = ScriptedPlane()
    plane.outcomes = [answer(3), answer([0.5])]
    program = context(plane, tmp_path)
    hook = LiveRewardContext(program._services, TrajectorySpec(TrajectoryId("t"), GroupId("g")), "t", 7, Recorded())

    async def body() -> None:
        assert await hook.call(max, 1, 3, cpus=2, label="largest") == 3
        assert await hook.score("rm", ["a"], kind="tool") == [0.5]
        for asked, message in (
            (hook.score("rm"), "inputs is None: use a list of texts"),
            (hook.logprobs("teacher"), "token_ids is None"),
            (hook.call(max, 1, cpus=1, needs=Needs(cpus=1)), "cpus and needs are both given"),
        ):
            with pytest.raises(BadInput, match=message):
                await asked

    asyncio.run(body())
    assert [(call.kind, call.label) for call in plane.actions] == [
        ("reward", "largest"),
        ("reward", "score:rm"),
    ]
    assert plane.actions[0].demand["cpus"].least == 2
    assert len(hook.actions) == 2


def test_needs_of_a_service_are_judged_by_what_was_declared(tmp_path: Path) -> None:
    plane = ScriptedPlane()
    ctx = context(plane, tmp_path)
    for needs, message in (
        (Needs(service="judge"), "service 'judge' is not declared"),
        (Needs(service="rm", gpus=4), "service rm runs on 1, 2 GPUs, not on 4"),
    ):
        with pytest.raises(BadInput, match=message):
            asyncio.run(ctx.call(uses_service, "a", needs=needs))
    with pytest.raises(BadInput, match="only an async function can use a model service"):
        asyncio.run(ctx.call(max, 1, 2, needs=Needs(service="rm")))
    assert plane.action_ids == []


def test_numpy_token_ids_are_sent_as_numbers(tmp_path: Path) -> None:
    plane = ScriptedPlane()
    plane.outcomes = [answer([0.5])]
    asyncio.run(context(plane, tmp_path).score("rm", [np.array([1, 2], dtype=np.int32)]))
    _, (given,), _ = cloudpickle.loads(plane.payloads[0])
    assert given == [[1, 2]] and type(given[0][0]) is int


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"services": "rm"}, "services is 'rm': use a list of ServiceSpec"),
        ({"services": [3]}, r"services has 3: use ServiceSpec\("),
        ({"services": [ServiceSpec("rm", "/none")]}, "model directory /none does not exist"),
        ({"quotas": [ApiQuota("search"), ApiQuota("search")]}, "two quotas have the name 'search'"),
    ],
)
def test_pools_that_cannot_be_are_refused_in_one_line(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as raised:
        Pools(**chosen)
    assert "\n" not in str(raised.value)


def test_orders_of_one_chunk_keep_their_order_and_those_of_others_do_not_wait() -> None:
    done: list[str] = []

    async def body() -> None:
        orders = ChunkOrders()
        gate = asyncio.Event()

        async def slow() -> None:
            await gate.wait()
            done.append("load 0")

        async def told(name: str) -> None:
            done.append(name)

        left, right = GpuChunk(0, 1), GpuChunk(1, 1)
        async with asyncio.TaskGroup() as group:
            for chunk, carry_out in (
                (left, slow),
                (right, lambda: told("load 1")),
                (left, lambda: told("evict 0")),
                (None, lambda: told("clear")),
                (right, lambda: told("load 1 again")),
            ):
                group.create_task(orders.in_turn(chunk, carry_out))
                await asyncio.sleep(0)
            assert done == ["load 1"]
            gate.set()

    asyncio.run(body())
    assert done == ["load 1", "load 0", "evict 0", "clear", "load 1 again"]
