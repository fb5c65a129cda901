"""The gateway's HTTP server: requests of agents become orders, which the exchange of their key answers.

===========================================  ========================================
``POST /v1/chat/completions``                OpenAI's chat completions
``POST /v1/responses``, ``…/input_tokens``   OpenAI's Responses
``POST /v1/messages``, ``…/count_tokens``    Anthropic's Messages
``GET /v1/models``, ``GET /v1/models/ID``    one model; requests may name any
``GET /health``                              needs no key
===========================================  ========================================

The key is a bearer token (``Authorization``) or ``x-api-key``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from aiohttp import web

from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.gateway.dialects import chat, messages, responses
from heddle_dask.gateway.dialects.contract import STATUS_OF, AgentDialect, ReadRequest, compact
from heddle_dask.gateway.kept_responses import KeptResponses
from heddle_dask.gateway.orders import Exchange, OrderRefused, StepAnswer, StepOrder
from heddle_dask.gateway.text_holder import CALL_MARKERS, TextHolder, TextPart

FindExchange = Callable[[str], Exchange | None]
"""The exchange of a key; None: the key is unknown."""

MODEL_NAME = "policy"
MOST_BODY_BYTES = 32 << 20
_MOST_KEYS = 4096
# A stream begins when there is text or an answer, so that a refusal before it has its status; or after this time, so
# that clients do not take the wait of a step that is queued or preempted for a broken connection.
_PATIENCE_S = 10.0
_RETRY_AFTER_S = 2
_LOG = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def gateway_application(find: FindExchange, *, patience_s: float = _PATIENCE_S) -> web.Application:
    """The application; run it by `gateway_runner`.

    Parameters
    ----------
    find
        Called with the key of each request.
    patience_s
        Seconds of silence after which a client that streams is told that its step is still to come.
    """
    server = _GatewayServer(find, patience_s)
    application = web.Application(client_max_size=MOST_BODY_BYTES)
    dialects = (("/chat/completions", _CHAT), ("/responses", _RESPONSES), ("/messages", _MESSAGES))
    for base in ("/v1", ""):
        for path, dialect in dialects:
            application.router.add_post(base + path, server.handler(dialect, server.answer))
        application.router.add_post(f"{base}/messages/count_tokens", server.handler(_MESSAGES, server.count))
        application.router.add_post(f"{base}/responses/input_tokens", server.handler(_RESPONSES, server.count))
        application.router.add_get(f"{base}/models", server.handler(_CHAT, server.models))
        application.router.add_get(f"{base}/models/{{name:.+}}", server.handler(_CHAT, server.model))
    application.router.add_get("/health", _health)
    application.router.add_get("/", _health)
    application.router.add_route("*", "/{path:.*}", server.handler(_CHAT, server.unknown))
    return application


def gateway_runner(application: web.Application) -> web.AppRunner:
    """A runner whose handlers end when their client disconnects."""
    return web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)


# Modules are dialects: mypy needs to be told.
_CHAT = cast(AgentDialect, chat)
_RESPONSES = cast(AgentDialect, responses)
_MESSAGES = cast(AgentDialect, messages)

Served = Callable[[web.Request, AgentDialect], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class _GatewayServer:
    find: FindExchange
    patience_s: float
    kept: OrderedDict[str, KeptResponses] = field(default_factory=OrderedDict)

    def handler(self, dialect: AgentDialect, serve: Served) -> Handler:
        """A handler whose refusals have the form of the dialect."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await serve(request, dialect)
            except OrderRefused as refused:
                return _refusal(dialect, refused)
            except web.HTTPRequestEntityTooLarge:
                return _refusal(dialect, _too_large())
            except BadInput as error:
                return _refusal(dialect, OrderRefused(str(error), "invalid_request"))
            except HeddleError as error:
                return _refusal(dialect, OrderRefused(str(error), "failed"))
            except (ConnectionError, asyncio.CancelledError):
                raise
            except Exception as error:
                _LOG.exception("a request of an agent failed")
                return _refusal(dialect, OrderRefused(f"{type(error).__name__}: {error}", "failed"))

        return handle

    async def answer(self, request: web.Request, dialect: AgentDialect) -> web.StreamResponse:
        exchange, asked = await self._read(request, dialect)
        order = replace(
            asked.order,
            idempotency_key=request.headers.get("Idempotency-Key", ""),
            request_id=uuid.uuid4().hex,
            is_retry=request.headers.get("x-stainless-retry-count", "0") != "0",
        )
        if order.streams:
            return await _StreamedAnswer(request, asked, order, self.patience_s).send(exchange)
        return _json(asked.response(await exchange.answer(order)))

    async def count(self, request: web.Request, dialect: AgentDialect) -> web.StreamResponse:
        exchange, asked = await self._read(request, dialect)
        count = await exchange.count_tokens(asked.order)
        head = {"object": "response.input_tokens"} if dialect is _RESPONSES else {}
        return _json({**head, "input_tokens": count})

    async def models(self, request: web.Request, _dialect: AgentDialect) -> web.StreamResponse:
        self._exchange(request)
        ends = {"first_id": MODEL_NAME, "last_id": MODEL_NAME, "has_more": False}
        return _json({"object": "list", "data": [_model(MODEL_NAME)], **ends})

    async def model(self, request: web.Request, _dialect: AgentDialect) -> web.StreamResponse:
        self._exchange(request)
        return _json(_model(request.match_info["name"]))

    async def unknown(self, request: web.Request, _dialect: AgentDialect) -> web.StreamResponse:
        raise OrderRefused(f"{request.method} {request.path[:200]}: there is no such endpoint", "not_found")

    async def _read(self, request: web.Request, dialect: AgentDialect) -> tuple[Exchange, ReadRequest]:
        key, exchange = self._exchange(request)
        if (request.content_length or 0) > MOST_BODY_BYTES:
            raise _too_large()
        return exchange, dialect.read_request(await request.read(), self._kept(key))

    def _exchange(self, request: web.Request) -> tuple[str, Exchange]:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        for key in (token.strip() if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", "")):
            if key and (exchange := self.find(key)) is not None:
                return key, exchange
        raise OrderRefused("the API key is unknown: use the key of the trajectory", "authentication")

    def _kept(self, key: str) -> KeptResponses:
        kept = self.kept.setdefault(key, KeptResponses())
        self.kept.move_to_end(key)
        if len(self.kept) > _MOST_KEYS:
            self.kept.popitem(last=False)
        return kept


class _StreamedAnswer:
    """One answer on its way to a client that streams."""

    def __init__(self, request: web.Request, asked: ReadRequest, order: StepOrder, patience_s: float) -> None:
        self._request = request
        self._order = order
        self._patience_s = patience_s
        self._events = asked.events()
        json_calls = bool(order.tools) and order.structured is None
        markers = (*(CALL_MARKERS if order.tools else ()), *order.stop)
        self._holders = [TextHolder(markers, holds_json=json_calls) for _ in range(order.n)]
        self._untold: list[tuple[int, TextPart]] = []
        self._news = asyncio.Event()

    async def send(self, exchange: Exchange) -> web.StreamResponse:
        """Run the order; text goes out as it comes."""
        running = asyncio.ensure_future(exchange.answer(self._order, self._take))
        running.add_done_callback(lambda _ended: self._news.set())
        try:
            await self._wait()
            if running.done() and not self._untold:
                self._raise_refusal(running)
            response = web.StreamResponse(headers=_STREAM_HEADERS)
            await response.prepare(self._request)
            await response.write(self._events.opening())
            while not running.done():
                await response.write(self._taken() or self._events.alive())
                await self._wait()
            await response.write(self._taken() + self._last(running))
            return response
        finally:
            if not running.done():
                # The client has gone.
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await running

    def _take(self, choice: int, text: str) -> None:
        parts = self._holders[choice].add(text)
        if parts:
            self._untold += [(choice, part) for part in parts]
            self._news.set()

    def _taken(self) -> bytes:
        untold, self._untold = self._untold, []
        return b"".join(self._events.part(choice, part) for choice, part in untold)

    def _raise_refusal(self, running: asyncio.Future[StepAnswer]) -> None:
        """Raise what the step has failed with before its stream has begun, so that a status says so."""
        error = running.exception()
        if error is not None and not (isinstance(error, OrderRefused) and error.kind in self._events.told_in_stream):
            raise error

    async def _wait(self) -> None:
        """Until there is text, or the end, or the client should hear something."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                await self._news.wait()
        self._news.clear()

    def _last(self, running: asyncio.Future[StepAnswer]) -> bytes:
        try:
            answer = running.result()
        except OrderRefused as refused:
            return self._events.failure(refused)
        except Exception as error:
            _LOG.exception("a step of an agent failed")
            return self._events.failure(OrderRefused(f"{type(error).__name__}: {error}", "failed"))
        rest = b"".join(
            self._events.part(at, part)
            for at, choice in enumerate(answer.choices)
            for part in self._holders[at].end(choice.message)
        )
        return rest + self._events.ending(answer)


_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


async def _health(_request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


def _json(body: Any, status: int = 200) -> web.Response:
    text = compact(body).encode("utf-8", "backslashreplace")
    return web.Response(body=text, status=status, content_type="application/json", charset="utf-8")


def _refusal(dialect: AgentDialect, refused: OrderRefused) -> web.Response:
    response = _json(dialect.error_body(refused), STATUS_OF[refused.kind])
    if refused.kind == "overloaded":
        response.headers["Retry-After"] = str(_RETRY_AFTER_S)
    elif refused.kind == "budget":
        response.headers["x-should-retry"] = "false"
    elif refused.kind == "too_large":
        # What has come of the body is not read.
        response.force_close()
    return response


def _too_large() -> OrderRefused:
    return OrderRefused(f"the body has more than {MOST_BODY_BYTES >> 20} MiB: send less", "too_large")


def _model(name: str) -> dict[str, Any]:
    """A model in the form of both APIs."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "heddle"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
