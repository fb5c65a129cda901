"""A chat endpoint without anything around it, until `gateway.server` is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from aiohttp import web

from heddle_dask.chat.conversation import ChatMessage
from heddle_dask.gateway.orders import Exchange, OrderRefused, StepOrder

_STATUS = {"authentication": 401, "overloaded": 429, "failed": 500}


def gateway_application(exchange_of: Callable[[str], Exchange]) -> web.Application:
    """Serve ``/v1/chat/completions``."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        messages = tuple(ChatMessage(each["role"], each["content"]) for each in body["messages"])
        order = StepOrder(messages, max_tokens=body.get("max_tokens"), streams=bool(body.get("stream")))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        texts: list[str] = []
        queue: asyncio.Queue[str | None] = asyncio.Queue()

        def on_text(choice: int, text: str) -> None:
            queue.put_nowait(text)

        async def write() -> None:
            await stream.prepare(request)
            while (text := await queue.get()) is not None:
                texts.append(text)
                await stream.write(f"data: {json.dumps({'text': text})}\n\n".encode())

        try:
            if order.streams:
                writing = asyncio.ensure_future(write())
            answer = await exchange_of(key).answer(order, on_text if order.streams else None)
        except OrderRefused as error:
            return web.json_response(
                {"error": {"message": str(error), "type": error.kind}}, status=_STATUS.get(error.kind, 400)
            )
        if not order.streams:
            message = {"role": "assistant", "content": answer.choices[0].message.content}
            return web.json_response({"choices": [{"message": message}], "usage": {}})
        queue.put_nowait(None)
        await writing
        rest = answer.choices[0].raw[len("".join(texts)) :]
        await stream.write(f"data: {json.dumps({'text': rest, 'end': True})}\n\n".encode())
        return stream

    application = web.Application()
    application.router.add_post("/v1/chat/completions", complete)
    return application
