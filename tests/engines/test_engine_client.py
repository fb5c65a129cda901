"""The HTTP client of an engine against a server that behaves badly in one way."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from heddle_dask.engines.address import EngineAddress
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import EngineUnreachable, GenerateRequest, SamplingParams

LATE_ABORTS = 10
ABORTED = b'data: {"choices":[{"finish_reason":"abort","token_ids":[],"weight_versions":[]}]}\n\n'


@asynccontextmanager
async def _engine_that_knows_a_step_late() -> AsyncIterator[EngineClient]:
    """It has forgotten the first aborts when it comes to know the step that they were for."""
    aborts = 0
    ended = asyncio.Event()

    async def generate(_: web.Request) -> web.Response:
        await ended.wait()
        return web.Response(body=ABORTED, content_type="text/event-stream")

    async def abort(_: web.Request) -> web.Response:
        nonlocal aborts
        aborts += 1
        if aborts > LATE_ABORTS:
            ended.set()
        return web.json_response({"status": "aborted"})

    routes = [web.post("/inference/v1/generate", generate), web.post("/abort_requests", abort)]
    async with _serving(routes) as client:
        yield client


@asynccontextmanager
async def _serving(routes: list[web.RouteDef]) -> AsyncIterator[EngineClient]:
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        with tempfile.TemporaryDirectory() as directory:
            address = EngineAddress(f"{directory}/engine.sock")
            await web.UnixSite(runner, address.socket).start()
            async with EngineClient(address) as client:
                yield client
    finally:
        await runner.cleanup()


def test_an_abort_is_repeated_until_the_step_has_ended() -> None:
    async def scenario() -> None:
        async with _engine_that_knows_a_step_late() as client:
            step = asyncio.ensure_future(
                client.generate(GenerateRequest("step", (1, 2), SamplingParams(max_tokens=10)))
            )
            await asyncio.sleep(0)
            await client.abort(["step"])
            assert step.done()
            assert step.result().finish_reason == "abort"

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_an_abort_of_nobody_asks_nothing() -> None:
    async def scenario() -> None:
        async with EngineClient(EngineAddress("/no/such.sock")) as client:
            await client.abort([])

    asyncio.run(scenario())


@pytest.mark.parametrize("first", [b"", b'data: {"choices":[]}\n\n'], ids=["headers", "token"])
def test_closing_the_client_ends_a_step_whose_answer_has_begun(first: bytes) -> None:
    """vLLM sends the first token at once, and an engine may then never send the rest."""
    began = asyncio.Event()

    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(first)
        began.set()
        await asyncio.Event().wait()
        return response

    async def scenario() -> None:
        async with _serving([web.post("/inference/v1/generate", generate)]) as client:
            step = asyncio.ensure_future(
                client.generate(GenerateRequest("step", (1, 2), SamplingParams(max_tokens=10)))
            )
            await began.wait()
            while not client._streams:
                await asyncio.sleep(0)
            await client.close()
            with pytest.raises(EngineUnreachable, match="is unreachable"):
                await step
            # A question after that opens no new connection.
            with pytest.raises(EngineUnreachable, match="its client is closed"):
                await client.abort(["step"])

    asyncio.run(asyncio.wait_for(scenario(), 20))
