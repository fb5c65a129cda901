"""What the servers of this package share: a Unix socket of their owner, and errors as one line of JSON."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def errors_as_json(statuses: Mapping[Any, int]) -> Any:
    """A middleware that answers these errors with their HTTP status, the first that fits, and a wrong body with 400."""

    @web.middleware
    async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except tuple(statuses) as error:
            return _error(str(error), next(statuses[kind] for kind in statuses if isinstance(error, kind)))
        except (KeyError, TypeError, ValueError) as error:
            return _error(f"the request is not valid: {type(error).__name__} {error}", 400)

    return answered


def _error(message: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": " ".join(message.split())}}, status=status)


async def serve_on_socket(application: web.Application, socket: str) -> None:
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    os.umask(0o077)
    await web.UnixSite(runner, socket).start()
    await asyncio.Event().wait()
