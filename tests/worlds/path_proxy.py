"""A reverse proxy that serves a local port under a path, as jupyter-server-proxy and Open OnDemand do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import ClientSession, WSMsgType, web

HOP_BY_HOP = {"transfer-encoding", "content-encoding", "content-length", "connection", "keep-alive"}


@contextlib.asynccontextmanager
async def path_proxy(port: int, prefix: str) -> AsyncIterator[str]:
    """Yields the URL under which the port is served; the prefix is cut off what is passed on."""
    async with ClientSession() as session:

        async def page(request: web.Request) -> web.StreamResponse:
            target = f"http://127.0.0.1:{port}/{request.match_info['path']}"
            if request.query_string:
                target += f"?{request.query_string}"
            if request.headers.get("Upgrade", "").lower() == "websocket":
                return await _websocket(session, request, target)
            async with session.request(request.method, target, data=await request.read()) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
                return web.Response(status=answer.status, headers=kept, body=await answer.read())

        app = web.Application()
        app.router.add_route("*", prefix + "/{path:.*}", page)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}{prefix}"
        finally:
            await runner.cleanup()


async def _websocket(session: ClientSession, request: web.Request, target: str) -> web.WebSocketResponse:
    asked = [each.strip() for each in request.headers.get("Sec-WebSocket-Protocol", "").split(",") if each.strip()]
    async with session.ws_connect(target, protocols=asked) as behind:
        front = web.WebSocketResponse(protocols=[behind.protocol] if behind.protocol else asked)
        await front.prepare(request)

        async def pump(source: web.WebSocketResponse | object, sink: object) -> None:
            async for message in source:  # type: ignore[attr-defined]
                if message.type is WSMsgType.TEXT:
                    await sink.send_str(message.data)  # type: ignore[attr-defined]
                elif message.type is WSMsgType.BINARY:
                    await sink.send_bytes(message.data)  # type: ignore[attr-defined]

        pumps = [asyncio.ensure_future(pump(front, behind)), asyncio.ensure_future(pump(behind, front))]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for each in pumps:
            each.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        await front.close()
    return front
