"""Agents that speak HTTP: their requests become steps of their trajectory, and nothing of them waits for ever."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import cloudpickle
import pytest
from distributed import Client
from worlds.certificates import loopback_certificate
from worlds.live_world import cluster, descendants, emulated, kill, run, worker_process
from worlds.shared_cluster import another_client, shared_cluster

from heddle_dask import BadInput, Context, Output, Rollout, Task
from heddle_dask.environments.agent_gateway import AgentGateway
from heddle_dask.gateway.session import GatewaySession
from heddle_dask.live.driver.programs import context
from heddle_dask.live.wire.messages import ENGINE_PLUGIN
from heddle_dask.live.worker import gateway_process
from heddle_dask.live.worker.gateway_tls import CERT_VARIABLE, KEY_VARIABLE, PORT_VARIABLE
from heddle_dask.records.reader import RunReader

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.cluster
LONG = {"max_tokens": 3000}


class Agents:
    """Programs with agents in them, a task for each."""

    name = "agents"

    def __init__(self, *programs: Callable[[Context], Awaitable[None]]) -> None:
        self._programs = {program.__name__: program for program in programs}

    def tasks(self, count: int, seed: int) -> list[Task]:
        return [Task(name, name) for name in self._programs]

    async def solve(self, task: Task, ctx: Context) -> float:
        await self._programs[task.task_id](ctx)
        return 1.0


def post(gate: AgentGateway, *contents: str, key: str = "", **more: Any) -> Any:
    """One request for a chat completion over the gateway's loopback port."""
    roles = ["user", "assistant"]
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(contents)]
    body = {"model": "any", "messages": messages, "max_tokens": 16, **more}
    return aiohttp.request(
        "POST",
        f"{gate.loopback_url}/v1/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {key or gate.key}"},
    )


async def ask(gate: AgentGateway, *contents: str, **more: Any) -> tuple[int, dict[str, Any]]:
    async with post(gate, *contents, **more) as answer:
        return answer.status, await answer.json()


async def pieces_of(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in answer.content:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                yield choice["delta"].get("content") or ""


def text_of(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["message"]["content"])


# -- what agents do --------------------------------------------------------------------------------


async def asks_twice(ctx: Context) -> None:
    gate = await ctx.gateway()
    assert await ctx.gateway() is gate
    status, first = await ask(gate, "hello")
    assert status == 200, first
    status, _ = await ask(gate, "hello", text_of(first), "and now?")
    assert status == 200
    assert (gate.requests, gate.steps) == (2, 2)
    for key in (gate.key[:-1] + "_", "sk-x"):
        status, wrong = await ask(gate, "hello", key=key)
        assert status == 401 and wrong["error"]["message"], wrong
    with pytest.raises(BadInput, match="not on a fork"):
        await ctx.fork().gateway()
    gate.close()
    status, ended = await ask(gate, "hello", text_of(first), "and now?")
    assert status == 401 and "has ended" in ended["error"]["message"]


async def reads_as_it_comes(ctx: Context) -> None:
    gate = await ctx.gateway()
    async with post(gate, "count", stream=True, **{**LONG, "max_tokens": 60}) as answer:
        pieces = [piece async for piece in pieces_of(answer)]
    assert sum(map(bool, pieces)) > 3, "it came as it was sampled"


async def goes_away(ctx: Context) -> None:
    gate = await ctx.gateway()
    async with post(gate, "count", stream=True, **LONG) as answer:
        async for piece in pieces_of(answer):
            if piece:
                break
    waiting = asyncio.ensure_future(ask(gate, "another", **LONG))
    await asyncio.sleep(0.2)
    waiting.cancel()
    await nothing_runs(ctx)


_IN_SANDBOX = """
import json, os, urllib.request
body = {"model": "any", "max_tokens": 16, "messages": [{"role": "user", "content": "hello"}]}
head = {"Authorization": "Bearer " + os.environ["KEY"], "Content-Type": "application/json"}
url = os.environ["URL"] + "/v1/chat/completions"
asked = urllib.request.Request(url, json.dumps(body).encode(), head)
print(json.load(urllib.request.urlopen(asked))["choices"][0]["finish_reason"])
"""


async def runs_in_a_sandbox(ctx: Context) -> None:
    gate = await ctx.gateway()
    async with ctx.sandbox(files={"agent.py": _IN_SANDBOX}, gateway=gate) as box:
        done = await box.exec(f"KEY={gate.key} URL={gate.url} python3 agent.py")
        assert done.stdout.strip() == "length", done.stdout + done.stderr
    assert gate.steps == 1


async def floods(ctx: Context) -> None:
    gate = await ctx.gateway()
    asking = [asyncio.ensure_future(ask(gate, f"number {each}", max_tokens=300)) for each in range(80)]
    answers = await asyncio.gather(*asking)
    refused = [body for status, body in answers if status == 429]
    assert len(refused) == 16 and "requests of this key are open" in refused[0]["error"]["message"]
    assert {status for status, _ in answers} == {200, 429}


async def loses_its_gateway(ctx: Context) -> None:
    gate = await ctx.gateway()
    asking = asyncio.ensure_future(ask(gate, "hello", **LONG))
    while not gate.requests:
        await asyncio.sleep(0.01)
    for process in descendants(gateway_process.__name__):
        kill(process.pid)
    with pytest.raises(aiohttp.ClientError):
        await asking
    # The sockets are those of the worker: the next request waits for the next process.
    status, answer = await ask(gate, "hello again")
    assert status == 200, answer


RUNNING: dict[str, Callable[[], Awaitable[int]]] = {}


async def nothing_runs(ctx: Context) -> None:
    """Wait until the engine runs no step: what clients left alone was aborted."""
    while await RUNNING["steps"]():
        await asyncio.sleep(0.05)


def _steps_in_flight(dask_worker: Any) -> int:
    plugin = dask_worker.plugins.get(ENGINE_PLUGIN)
    return 0 if plugin is None or plugin.client is None else plugin.client.steps_in_flight


async def rolled_out(
    client: Client,
    model_dir: str,
    *programs: Callable[[Context], Awaitable[None]],
    out: Output | None = None,
    interrupted: Callable[[], Awaitable[Any]] | None = None,
) -> dict[str, Any]:
    """The records of one attempt at each program, by name; the run is interrupted when `interrupted` has returned."""
    engines = emulated(model_dir, seconds_per_token=0.005, slots=64, emulation={"mean_length_tokens": 1e5})

    async def steps() -> int:
        counts = await client.run(_steps_in_flight, on_error="ignore")  # a worker may just have gone
        return sum(counts.values())

    RUNNING["steps"] = steps
    async with Rollout(client, env=Agents(*programs), model=model_dir, engines=engines, out=out) as rollout:
        running = asyncio.ensure_future(rollout.run(len(programs)))
        if interrupted is not None:
            await interrupted()
            rollout.interrupt(to_resume=True)
        batch = await running
    return {record.task_id: record for record in batch}


def test_requests_are_steps_and_what_agents_do_to_them_harms_nobody(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "GatewaySession", partial(GatewaySession, grace_s=0.3))

    async def body() -> None:
        async with shared_cluster(1) as client:
            records = await rolled_out(client, model_dir, asks_twice, reads_as_it_comes, runs_in_a_sandbox, floods)
            for record in records.values():
                assert record.status == "completed", record.detail
            twice = records["asks_twice"]
            assert len(twice.steps) == 2 and twice.metadata["gateway"] == {"requests": 2}
            records = await rolled_out(client, model_dir, goes_away)
            assert records["goes_away"].status == "completed", records["goes_away"].detail
            records = await rolled_out(client, model_dir, loses_its_gateway)
            lost = records["loses_its_gateway"]
            assert lost.status == "completed", lost.detail
            assert lost.metadata["gateway"]["lost"] == ["the gateway process was lost"]

    run(body())


BEGUN: Counter[str] = Counter()
HALFWAY = "asked once"


async def ends_early(ctx: Context) -> None:
    BEGUN["ends_early"] += 1
    gate = await ctx.gateway()
    status, _ = await ask(gate, "hello")
    assert status == 200


async def is_interrupted(ctx: Context) -> None:
    """What it says differs from attempt to attempt, as with agents that tell the time."""
    BEGUN["is_interrupted"] += 1
    gate = await ctx.gateway()
    said = f"hello, it is {BEGUN['is_interrupted']} o'clock"
    status, first = await ask(gate, said)
    assert status == 200
    if BEGUN["is_interrupted"] < 3:
        BEGUN[HALFWAY] += 1
        await asyncio.Event().wait()
    status, _ = await ask(gate, said, text_of(first), "and now?")
    assert status == 200


def test_an_interrupted_agent_begins_again_and_one_that_ended_does_not(model_dir: str, tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"

    async def body() -> None:
        async with shared_cluster(1) as client:
            for mode in ("create", "resume"):

                async def half_done(times: int = BEGUN[HALFWAY] + 1) -> None:
                    while BEGUN[HALFWAY] < times or not BEGUN["ends_early"]:
                        await asyncio.sleep(0.05)
                    await asyncio.sleep(0.3)

                records = await rolled_out(
                    *(client, model_dir, ends_early, is_interrupted),
                    out=Output(out, mode),
                    interrupted=half_done,
                )
                assert records["is_interrupted"].status == "aborted"
            records = await rolled_out(client, model_dir, ends_early, is_interrupted, out=Output(out, "resume"))
            assert BEGUN == {"ends_early": 1, "is_interrupted": 3, HALFWAY: 2}
            record = records["is_interrupted"]
            assert record.status == "completed", record.detail
            assert record.metadata["begun_again"] == 2 and len(record.steps) == 2
            assert "environment_failures" not in record.metadata

    run(body())
    stored = {record.task_id: record for record in RunReader(out)}
    assert stored["is_interrupted"].metadata["gateway"] == {"requests": 2}
    assert set(stored) == {"ends_early", "is_interrupted"}


def test_no_request_outlives_its_driver_or_its_tool_worker(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "GatewaySession", partial(GatewaySession, grace_s=0.3))
    certificate, secret = loopback_certificate(tmp_path)
    for name, value in {PORT_VARIABLE: "0", CERT_VARIABLE: str(certificate), KEY_VARIABLE: str(secret)}.items():
        monkeypatch.setenv(name, value)
    gates: list[AgentGateway] = []

    async def waits(ctx: Context) -> None:
        gate = await ctx.gateway()
        trusted = ssl.create_default_context(cafile=str(certificate))
        head = {"Authorization": f"Bearer {gate.key}"}
        async with aiohttp.request("GET", f"{gate.remote_url}/v1/models", headers=head, ssl=trusted) as answer:
            assert gate.remote_url.startswith("https://") and answer.status == 200
        gates.append(gate)
        await asyncio.Event().wait()

    async def body() -> None:
        async with cluster(1) as (_, client):
            other = await another_client(client)
            running = asyncio.ensure_future(rolled_out(other, model_dir, waits))
            while not gates:
                await asyncio.sleep(0.01)
            asking = asyncio.ensure_future(ask(gates[0], "hello", **LONG))
            while not gates[0].requests:
                await asyncio.sleep(0.01)
            await other._close(fast=True)
            status, answer = await asking
            assert status == 500 and "has ended" in answer["error"]["message"], answer
            running.cancel()
            await asyncio.wait([running])
            # The same key is of no use any more.
            status, answer = await ask(gates[0], "hello", **LONG)
            assert status == 401, answer

            async def loses_its_worker(ctx: Context) -> None:
                gate = await ctx.gateway()
                asking = asyncio.ensure_future(ask(gate, "hello", **LONG))
                while not gate.requests:
                    await asyncio.sleep(0.01)
                kill(worker_process("tool-0").pid)
                with pytest.raises(aiohttp.ClientError):
                    await asking
                await nothing_runs(ctx)

            record = (await rolled_out(client, model_dir, loses_its_worker))["loses_its_worker"]
            assert record.status == "completed", record.detail
            assert record.metadata["gateway"]["lost"] == ["its tool worker was lost"]

    run(body())
