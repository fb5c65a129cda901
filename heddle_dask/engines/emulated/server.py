"""The emulated engine's HTTP server: the part of vLLM's HTTP interface that the project uses, and faults.

One endpoint is not vLLM's: ``POST /faults`` with a JSON object of `traits.EmulatedFaults` replaces the faults in force
and restarts their counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.address import EngineAddress
from heddle_dask.engines.contract import WARM_UP_REQUEST_ID
from heddle_dask.engines.emulated.kv_transfer import READ_PATH, EmulatedKvTransfers, TransferFailed
from heddle_dask.engines.emulated.steps import BadRequest, EmulatedEngine
from heddle_dask.engines.emulated.traits import EmulatedFaults, traits_of
from heddle_dask.engines.emulated.weight_update import EmulatedWeightUpdates, LoadFailed, json_object
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.wire import (
    CONFIGURATION_METHOD,
    CONFIGURATION_PATH,
    COUNTERS_PATH,
    GENERATED_TOKENS,
    KV_USE,
    STREAMED_TOKENS,
)

_LONGEST_BODY_BYTES = 1 << 28
# Seconds between two looks at a step whose tokens are sent as they are sampled.
_STREAM_S = 0.02

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EmulatedServer:
    """HTTP handlers of one `EmulatedEngine`; faults apply before they run."""

    def __init__(self, spec: EngineSpec, address: EngineAddress) -> None:
        traits = traits_of(spec)
        self._spec = spec
        self._engine = EmulatedEngine(spec, traits)
        self._cost = traits.cost
        self._kv_blocks = traits.kv_capacity_tokens // traits.cost.block_tokens
        self._transfers = EmulatedKvTransfers(spec, traits, self._engine, address)
        self._faults = traits.faults
        self._updates = EmulatedWeightUpdates(self._engine, traits.emulation, lambda: self._faults)
        self._received = 0
        self._hangs = False
        # Set: the engine answers no step, and had these counters when that began.
        self._stuck_at: str | None = None

    def application(self) -> web.Application:
        application = web.Application(client_max_size=_LONGEST_BODY_BYTES)
        for method, path, handler in (
            ("GET", "/health", self._health),
            ("GET", "/v1/models", self._models),
            ("POST", CONFIGURATION_PATH, self._called),
            ("GET", COUNTERS_PATH, self._counters),
            ("POST", "/inference/v1/generate", self._generate),
            ("POST", "/abort_requests", self._abort),
            ("POST", READ_PATH, self._kv_read),
            ("POST", "/faults", self._set_faults),
            *self._updates.routes(),
        ):
            # A path of the dialect may carry a query.
            application.router.add_route(method, path.partition("?")[0], self._guarded(handler))
        return application

    async def close(self) -> None:
        """Free the engine's resources, after the last request."""
        await self._transfers.close()
        self._engine.close()

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            if self._hangs:
                await asyncio.Event().wait()
            try:
                return await handler(request)
            except (BadRequest, BadInput) as error:
                return _error(400, str(error))
            except (TransferFailed, LoadFailed) as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                return _error(500, str(error))

        return guarded

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _request: web.Request) -> web.Response:
        model = {
            "id": self._spec.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "heddle-emulated",
            "root": self._spec.model,
            "max_model_len": self._spec.named_context_tokens,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _called(self, request: web.Request) -> web.Response:
        if (await json_object(request)).get("method") != CONFIGURATION_METHOD:
            return await self._updates.load(request)
        config = {
            "scheduler_config": {
                "max_num_seqs": self._spec.named_slots,
                "max_num_batched_tokens": self._cost.chunk_tokens,
                "enable_chunked_prefill": not self._cost.whole_prompts,
            },
            "parallel_config": {"tensor_parallel_size": self._spec.tp_degree},
            "cache_config": {"block_size": self._cost.block_tokens, "num_gpu_blocks": self._kv_blocks},
            "kv_transfer_config": self._transfers.config,
        }
        return web.json_response({"results": [config]})

    async def _counters(self, _request: web.Request) -> web.Response:
        return web.Response(text=self._counted() if self._stuck_at is None else self._stuck_at)

    def _counted(self) -> str:
        tokens, context_tokens = self._engine.counters()
        use = context_tokens / (self._kv_blocks * self._cost.block_tokens)
        return f"{GENERATED_TOKENS} {float(tokens)}\n{KV_USE} {use}\n"

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await json_object(request)
        if body.get("request_id") != WARM_UP_REQUEST_ID:
            self._received += 1
            if _over(self._received, self._faults.crash_after_requests):
                print("RuntimeError: crashed as asked (fault)", file=sys.stderr, flush=True)
                os._exit(1)
            if _over(self._received, self._faults.hang_after_requests):
                self._hangs = True
                await asyncio.Event().wait()
            stuck = _over(self._received, self._faults.stuck_after_requests)
            if stuck and self._stuck_at is None:
                self._stuck_at = self._counted()
            if _over(self._received, self._faults.refuse_after_requests):
                return _error(500, "failed as asked (fault)")
        if self._stuck_at is None and _streams(body):
            return await self._streamed(request, body)
        answer = "" if self._stuck_at is not None else await self._transfers.run(body)
        if self._faults.kv_blocks_expired:
            self._transfers.let_go_of_all()
        if self._hangs or self._stuck_at is not None:
            await asyncio.Event().wait()
        return web.Response(body=answer.encode(), content_type="application/json")

    async def _streamed(self, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
        """Answer with tokens as they are sampled; a step that ends before the first look is one object."""
        name = str(body.get("request_id", ""))
        response: web.StreamResponse | None = None
        sent = 0
        running = asyncio.ensure_future(self._transfers.run(body))
        try:
            while not (await asyncio.wait({running}, timeout=_STREAM_S))[0]:
                step, sampled = self._engine.running(name)
                if step is not None and sampled > sent:
                    if response is None:
                        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                        await response.prepare(request)
                    await response.write(step.part(sent, sampled).encode())
                    sent = sampled
        finally:
            running.cancel()
        answer = running.result()
        if response is None:
            return web.Response(body=answer.encode(), content_type="application/json")
        last = json.loads(answer)
        choice = last["choices"][0]
        choice["token_ids"] = choice["token_ids"][sent:]
        choice["logprobs"]["content"] = choice["logprobs"]["content"][sent:]
        await response.write(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode())
        return response

    async def _abort(self, request: web.Request) -> web.Response:
        names = (await json_object(request)).get("request_ids")
        if names and not (isinstance(names, list) and all(isinstance(n, str) for n in names)):
            raise BadRequest("request_ids must be a list of strings.")
        aborted = self._engine.abort(names) if names else self._engine.abort_all()
        aborted += self._transfers.abort(names or ())
        return web.json_response({"status": "aborted", "aborted": aborted})

    async def _kv_read(self, request: web.Request) -> web.Response:
        question = await json_object(request)
        if self._faults.kv_source_lost and request.transport is not None:
            request.transport.close()
        await self._transfers.read(question)
        return web.json_response({"status": "read"})

    async def _set_faults(self, request: web.Request) -> web.Response:
        self._faults = EmulatedFaults.from_mapping(await json_object(request))
        self._received = 0
        self._engine.set_slow_factor(self._faults.slow_factor)
        return web.json_response({"status": "set"})


def _streams(body: Mapping[str, Any]) -> bool:
    """Whether the answer is to come in pieces: vLLM is asked for a piece that no step fills where it is not."""
    sampling = body.get("sampling_params") or {}
    return bool(body.get("stream")) and sampling.get("stream_interval") == STREAMED_TOKENS


def _over(received: int, allowed: int | None) -> bool:
    return allowed is not None and received > allowed


def _error(status: int, message: str) -> web.Response:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    error = {"message": message, "type": kind, "code": status}
    return web.json_response({"error": error}, status=status)


async def serve(spec: EngineSpec, address: EngineAddress) -> None:
    server = EmulatedServer(spec, address)
    # Without cancellation a step would run to its end after its caller has disconnected.
    runner = web.AppRunner(server.application(), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        site = (
            web.UnixSite(runner, address.socket, shutdown_timeout=0.2, backlog=1024)
            if address.socket
            else web.TCPSite(runner, "127.0.0.1", address.port, shutdown_timeout=0.2, backlog=1024)
        )
        await site.start()
        print(f"emulated engine for {spec.model} at {address}", file=sys.stderr, flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
        await server.close()
