"""An OTLP collector for tests: an HTTP server on loopback that decodes what it is sent."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class OtlpReceiver:
    """Use it in a ``with``; `answers` are the HTTP statuses of the first requests, then 200."""

    def __init__(self, answers: list[int] | None = None) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.requests: list[tuple[str, dict[str, str]]] = []
        self._answers = list(answers or [])
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve)
        self.endpoint = ""

    def __enter__(self) -> OtlpReceiver:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        self._loop.run_until_complete(self._open())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _open(self) -> None:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._take)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.endpoint = f"http://127.0.0.1:{port}"

    async def _take(self, request: web.Request) -> web.Response:
        self.requests.append((request.path, dict(request.headers)))
        if self._answers and (status := self._answers.pop(0)) != 200:
            return web.Response(status=status)
        message = ExportTraceServiceRequest()
        message.ParseFromString(await request.read())
        for resource in message.resource_spans:
            self.services |= {str(value) for name, value in values(resource.resource).items() if name == "service.name"}
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response(body=b"", content_type="application/x-protobuf")


def values(span: Any) -> dict[str, Any]:
    """The attributes of a span or a resource, as plain values."""
    return {each.key: _plain(each.value) for each in span.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(each) for each in value.array_value.values]
    return getattr(value, kind)
