"""When an engine counts as stuck: a server that answers all but steps, on its socket."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from heddle_dask.engines.address import EngineAddress
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import CANARY_REQUEST_ID, GenerateRequest, SamplingParams
from heddle_dask.engines.progress import ProgressWatch

ANSWER = {"choices": [{"finish_reason": "length", "token_ids": [1], "logprobs": {"content": [{"logprob": 0.0}]}}]}
STEP = GenerateRequest("step", (1, 2), SamplingParams(max_tokens=10))


class StillEngine:
    """Runs no step. Its counters are `counters`; a canary is answered with `canary_status`, or never."""

    def __init__(self, canary_status: int | None, counters: Callable[[], str] = str) -> None:
        self.canary_status = canary_status
        self.counters = counters
        self.canaries = self.questions = 0

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["request_id"] == CANARY_REQUEST_ID:
            self.canaries += 1
            if self.canary_status is not None:
                return web.json_response(ANSWER, status=self.canary_status)
        await asyncio.Event().wait()
        raise AssertionError("it never ends")

    async def metrics(self, _: web.Request) -> web.Response:
        self.questions += 1
        return web.Response(text=self.counters())

    @asynccontextmanager
    async def client(self) -> AsyncIterator[EngineClient]:
        app = web.Application()
        app.add_routes([web.post("/inference/v1/generate", self.generate), web.get("/metrics", self.metrics)])
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


def _run(
    engine: StillEngine,
    scenario: Callable[[asyncio.Future[str]], Awaitable[None]],
    *,
    steps: int = 1,
    canary_s: float = 0.1,
) -> None:
    async def main() -> None:
        async with engine.client() as client:
            held = [asyncio.ensure_future(client.generate(STEP)) for _ in range(steps)]
            await asyncio.sleep(0)
            watch = ProgressWatch(client, stall_s=0.05, canary_s=canary_s)
            stuck = asyncio.ensure_future(watch.until_stuck())
            try:
                await scenario(stuck)
            finally:
                for task in (stuck, *held):
                    task.cancel()
                await asyncio.gather(stuck, *held, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(("status", "cause"), [(None, "no answer within 0.1 s"), (500, "engine failed (HTTP 500): ")])
def test_an_engine_that_answers_no_canary_is_stuck(status: int | None, cause: str) -> None:
    async def scenario(stuck: asyncio.Future[str]) -> None:
        said = await stuck
        start = "it made no progress for 0.05 s with 1 steps in flight, and a one-token request failed: "
        assert said.startswith(start + cause)

    _run(StillEngine(status), scenario)


@pytest.mark.parametrize("status", [200, 400])
def test_an_engine_that_answers_its_canary_is_not(status: int) -> None:
    """Whatever its steps do: it has no counters, and a long prefill shows nothing either."""
    engine = StillEngine(status)

    async def scenario(stuck: asyncio.Future[str]) -> None:
        while engine.canaries < 4:
            await asyncio.sleep(0.01)
        assert not stuck.done()

    _run(engine, scenario, canary_s=30.0)


def test_an_engine_whose_counters_move_is_not_asked() -> None:
    count = iter(range(1, 1_000_000))
    engine = StillEngine(None, lambda: f"vllm:generation_tokens_total {next(count)}\n")

    async def scenario(stuck: asyncio.Future[str]) -> None:
        while engine.questions < 20:
            await asyncio.sleep(0.01)
        assert not stuck.done() and engine.canaries == 0

    _run(engine, scenario)


def test_a_counter_that_moves_while_a_canary_waits_for_a_slot_saves_the_engine() -> None:
    engine = StillEngine(None)
    # An iteration so long that a canary was sent: the counter shows its end.
    engine.counters = lambda: f"vllm:generation_tokens_total {engine.canaries}\n"

    async def scenario(stuck: asyncio.Future[str]) -> None:
        while engine.canaries < 3:
            await asyncio.sleep(0.01)
        assert not stuck.done()

    _run(engine, scenario)


def test_an_idle_engine_is_asked_nothing() -> None:
    engine = StillEngine(None)

    async def scenario(stuck: asyncio.Future[str]) -> None:
        await asyncio.sleep(0.3)
        assert not stuck.done()
        assert (engine.canaries, engine.questions) == (0, 0)

    _run(engine, scenario, steps=0)
