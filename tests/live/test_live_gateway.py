"""Agents that speak HTTP: their requests become steps of their trajectory, and nothing of them waits for ever."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import cloudpickle
import pytest
from worlds.live_world import emulated, run
from worlds.shared_cluster import shared_cluster

from heddle_dask import Context, Rollout, Task
from heddle_dask.environments.agent_gateway import AgentGateway

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.cluster


async def ask(gate: AgentGateway, *contents: str, key: str = "", **more: Any) -> tuple[int, dict[str, Any]]:
    """One request for a chat completion over the gateway's loopback port: its status, and the answer."""
    roles = ["user", "assistant"]
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(contents)]
    body = {"model": "any", "messages": messages, "max_tokens": 16, **more}
    headers = {"Authorization": f"Bearer {key or gate.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{gate.loopback_url}/v1/chat/completions", json=body) as answer,
    ):
        return answer.status, await answer.json()


def text_of(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["message"]["content"])


class Asking:
    """An agent in the program itself."""

    name = "asking"

    def tasks(self, count: int, seed: int) -> list[Task]:
        return [Task(f"t{number}", "go") for number in range(count)]

    async def solve(self, task: Task, ctx: Context) -> float:
        gate = await ctx.gateway()
        status, first = await ask(gate, task.task_id)
        assert status == 200, first
        status, _ = await ask(gate, task.task_id, text_of(first), "and now?")
        assert status == 200
        assert (gate.requests, gate.steps) == (2, 2)
        status, wrong = await ask(gate, "hello", key=gate.key[:-1] + "_")
        assert status == 401 and "ended" in wrong["error"]["message"]
        return 1.0


def test_requests_are_steps(model_dir: str) -> None:
    async def body() -> None:
        async with shared_cluster(1) as client:
            async with Rollout(client, env=Asking(), model=model_dir, engines=emulated(model_dir)) as rollout:
                batch = await rollout.run(3)
            records = list(batch)
            for record in records:
                assert record.status == "completed", record.detail
                assert len(record.steps) == 2 and record.metadata["gateway"]["requests"] == 2

    run(body())


class Streaming(Asking):
    """An agent that reads a reply as it comes, and one that goes away in the middle of it."""

    name = "streaming"

    async def solve(self, task: Task, ctx: Context) -> float:
        gate = await ctx.gateway()
        pieces: list[str] = []
        async for piece in stream(gate, "count"):
            pieces.append(piece)
        assert len(pieces) > 3, "it came as it was sampled"
        ctx.metadata["text"] = "".join(pieces)
        async for _ in stream(gate, "count", max_tokens=2000):
            break
        return float(len(pieces))


async def stream(gate: AgentGateway, text: str, max_tokens: int = 100) -> AsyncIterator[str]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "stream": True}
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {gate.key}"}) as session,
        session.post(f"{gate.loopback_url}/v1/chat/completions", json=body) as answer,
    ):
        async for line in answer.content:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])["text"]


def test_text_comes_as_it_is_sampled(model_dir: str) -> None:
    async def body() -> None:
        async with shared_cluster(1) as client:
            engines = emulated(model_dir, seconds_per_token=0.01, emulation={"mean_length_tokens": 100000})
            async with Rollout(client, env=Streaming(), model=model_dir, engines=engines) as rollout:
                (record,) = await rollout.run(1)
            assert record.status == "completed", record.detail

    run(body())
