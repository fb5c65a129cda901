"""A local HTTP server with the quotas of an API: it enforces windows and concurrency, and counts calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from aiohttp import web

from heddle_dask.core.resources import ApiQuota


@dataclass
class ApiServer:
    """Answers ``GET /search`` after `latency_s`; a call over the quota gets 429 with ``Retry-After: 1``.

    Attributes
    ----------
    answers
        What it answers instead of a result, by the number of the call from 0: a status, and a Retry-After or "".
    """

    quota: ApiQuota
    latency_s: float = 0.02
    answers: Callable[[int], tuple[int, str]] = lambda number: (200, "")
    url: str = ""
    begun_s: list[float] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0

    @property
    def rejected(self) -> int:
        """Calls over the quota."""
        return self.statuses.count(429)

    def over_quota(self, now_s: float) -> bool:
        if self.quota.concurrency and self.under_way >= self.quota.concurrency:
            return True
        return any(
            sum(begun_s > now_s - window.seconds for begun_s in self.begun_s) >= window.most
            for window in self.quota.windows
        )

    async def search(self, request: web.Request) -> web.Response:
        number, now_s = len(self.statuses), time.monotonic()
        self.keys.append(request.headers.get("Idempotency-Key", ""))
        status, after = (429, "1") if self.over_quota(now_s) else self.answers(number)
        self.statuses.append(status)
        self.begun_s.append(now_s)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self.latency_s)
        finally:
            self.under_way -= 1
        headers = {"Retry-After": after} if after else {}
        return web.json_response({"found": number, "reward": 0.5}, status=status, headers=headers)


@contextlib.asynccontextmanager
async def api_server(quota: ApiQuota, **options: object) -> AsyncIterator[ApiServer]:
    """The server, on a free port of the loopback interface."""
    server = ApiServer(quota, **options)  # type: ignore[arg-type]
    app = web.Application()
    app.router.add_route("*", "/search", server.search)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    server.url = f"http://127.0.0.1:{port}/search"
    try:
        yield server
    finally:
        await runner.cleanup()
