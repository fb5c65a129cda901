"""A server of sandboxes with leases: a sandbox whose lease is not renewed is ended by the reaper.

Every request has the server's token (``Authorization: Bearer …``). Bodies and answers are JSON, files are bytes:

========================================  ==========================================================================
``POST /sandboxes``                       ``{"spec"}``, of which its limits count; answers ``{"id", "lease_s"}``
``POST /sandboxes/ID/exec``               the fields of `Command`; answers those of `ExecResult`
``PUT`` and ``GET /sandboxes/ID/files``   ``?path=…``: the content of a file
``POST /sandboxes/ID/fork``               ``{}``; answers ``{"id", "lease_s"}``
``POST /sandboxes/ID/lease``              renews the lease
``DELETE /sandboxes/ID``                  ends it
========================================  ==========================================================================

An unknown or expired sandbox is 404, what a sandbox refuses 422 with ``{"error"}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.sandbox.process_accounting import ProcessAccounting
from heddle_dask.sandbox.stateful.contract import StatefulSandbox
from heddle_dask.sandbox.stateful.kinds import kind_named
from heddle_dask.sandbox.stateful.local_sandbox import LocalSandbox
from heddle_dask.sandbox.stateful.work_directory import reap
from heddle_dask.sandbox_service.contract import command_from_json, limits_from_json

_MOST_BODY_BYTES = 64 << 20
# Starts that go on at the same time.
_MAX_STARTS = 4


@dataclass(slots=True)
class _Leased:
    """A sandbox, when its lease ends (monotonic), how many requests use it now, and their tasks."""

    sandbox: StatefulSandbox
    until_s: float
    users: int = 0
    running: dict[asyncio.Task[Any], None] = field(default_factory=dict)
    one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)


class SandboxServer:
    """The application and its sandboxes.

    Parameters
    ----------
    lease_s
        Seconds without a request after which a sandbox is ended.
    max_sandboxes
        At the same time; one more is refused.
    """

    def __init__(
        self, base: Path, token: str, *, lease_s: float = 60.0, kind: str = "", max_sandboxes: int = 256
    ) -> None:
        self._base = base
        self._token = token
        self._lease_s = lease_s
        self._kind = kind
        self._max_sandboxes = max_sandboxes
        self._leased: dict[str, _Leased] = {}
        self._starting = 0
        self._starts = asyncio.Semaphore(_MAX_STARTS)
        self._accounting = ProcessAccounting()
        self.application = web.Application(client_max_size=_MOST_BODY_BYTES, middlewares=[self._guard])
        self.application.add_routes(
            [
                web.post("/sandboxes", self._create),
                web.post("/sandboxes/{id}/exec", self._exec),
                web.put("/sandboxes/{id}/files", self._put),
                web.get("/sandboxes/{id}/files", self._get),
                web.post("/sandboxes/{id}/fork", self._fork),
                web.post("/sandboxes/{id}/lease", self._renew),
                web.delete("/sandboxes/{id}", self._delete),
            ]
        )
        self.application.cleanup_ctx.append(self._reaping)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._leased)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), f"Bearer {self._token}".encode()):
            return web.json_response({"error": "the token is wrong"}, status=401)
        try:
            return await handler(request)
        except (HeddleError, LookupError, TypeError, ValueError) as error:
            return web.json_response({"error": str(error)}, status=422)

    async def _reaping(self, application: web.Application) -> AsyncIterator[None]:
        await asyncio.to_thread(reap, self._base)
        reaper = asyncio.create_task(self._reap())
        yield
        reaper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reaper
        for name in list(self._leased):
            await self._end(name)

    async def _reap(self) -> None:
        """End what was not used or renewed for the time of its lease."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            now_s = time.monotonic()
            for name, leased in list(self._leased.items()):
                if not leased.users and leased.until_s < now_s:
                    await self._end(name)

    async def _end(self, name: str) -> None:
        leased = self._leased.pop(name, None)
        if leased is not None:
            for task in list(leased.running):
                task.cancel()
            async with leased.one_at_a_time:
                await leased.sandbox.stop()

    @contextlib.asynccontextmanager
    async def _used(self, request: web.Request) -> AsyncIterator[StatefulSandbox]:
        leased = self._leased.get(request.match_info["id"])
        if leased is None:
            raise web.HTTPNotFound(text="no such sandbox")
        task = asyncio.current_task()
        assert task is not None
        leased.users += 1
        leased.running[task] = None
        try:
            async with leased.one_at_a_time:
                yield leased.sandbox
        finally:
            leased.users -= 1
            leased.running.pop(task, None)
            leased.until_s = time.monotonic() + self._lease_s

    def _keep(self, sandbox: StatefulSandbox) -> web.Response:
        name = secrets.token_hex(16)
        self._leased[name] = _Leased(sandbox, time.monotonic() + self._lease_s)
        return web.json_response({"id": name, "lease_s": self._lease_s}, status=201)

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """A place for one more sandbox while it starts, and one of the few starts at a time."""
        if len(self._leased) + self._starting >= self._max_sandboxes:
            raise web.HTTPServiceUnavailable(
                text=json.dumps({"error": "the server has no room for a further sandbox"}),
                content_type="application/json",
            )
        self._starting += 1
        try:
            async with self._starts:
                yield
        finally:
            self._starting -= 1

    async def _create(self, request: web.Request) -> web.Response:
        body = await _body(request)
        spec = replace(limits_from_json(body["spec"]), kind=self._kind)
        async with self._place():
            sandbox = LocalSandbox(_name(), spec, kind_named(spec.kind), self._base, self._accounting)
            try:
                await sandbox.start()
            except BaseException:
                await asyncio.shield(sandbox.stop())
                raise
            return self._keep(sandbox)

    async def _exec(self, request: web.Request) -> web.Response:
        command = command_from_json(await _body(request))
        async with self._used(request) as sandbox:
            return web.json_response(asdict(await sandbox.exec(command)))

    async def _put(self, request: web.Request) -> web.Response:
        content = await request.read()
        async with self._used(request) as sandbox:
            await sandbox.put(request.query["path"], content)
        return web.json_response({})

    async def _get(self, request: web.Request) -> web.Response:
        most_bytes = int(request.query.get("most_bytes", _MOST_BODY_BYTES))
        async with self._used(request) as sandbox:
            return web.Response(body=await sandbox.get(request.query["path"], most_bytes))

    async def _fork(self, request: web.Request) -> web.Response:
        async with self._used(request) as sandbox, self._place():
            return self._keep(await sandbox.fork(_name()))

    async def _renew(self, request: web.Request) -> web.Response:
        leased = self._leased.get(request.match_info["id"])
        if leased is None:
            raise web.HTTPNotFound(text="no such sandbox")
        leased.until_s = time.monotonic() + self._lease_s
        return web.json_response({"lease_s": self._lease_s})

    async def _delete(self, request: web.Request) -> web.Response:
        await self._end(request.match_info["id"])
        return web.json_response({})


def _name() -> str:
    """Of a sandbox: the client's is not unique, and its directory and its user follow from it."""
    return secrets.token_hex(16)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except RecursionError:
        raise BadInput("the body is nested too deeply") from None
    if not isinstance(body, dict):
        raise BadInput("the body is no JSON object")
    return body
