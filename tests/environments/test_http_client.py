"""One rule for proxies, with a real one on loopback: it serves addresses outside, and never this machine."""

from __future__ import annotations

import ast
import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from heddle_dask.apis.http_calls import HttpAnswer, http_call
from heddle_dask.environments.api_errors import Retry
from heddle_dask.http_client import cluster_session, proxy_of
from heddle_dask.sandbox.stateful.contract import SandboxSpec
from heddle_dask.sandbox_service.client import RemoteSandbox, SandboxSilent

PACKAGE = Path(__file__).parents[2] / "heddle_dask"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
NO_TUNNEL = b"HTTP/1.1 503 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@asynccontextmanager
async def proxy(monkeypatch: pytest.MonkeyPatch, no_proxy: str = "") -> AsyncIterator[list[bytes]]:
    """A proxy for everything, by the variables of this process; yields the heads of the requests that it gets."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(NO_TUNNEL if heads[-1].startswith(b"CONNECT") else OK)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", f"http://user:secret@127.0.0.1:{port}")
    monkeypatch.setenv("https_proxy", f"user:secret@127.0.0.1:{port}")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    async with server:
        yield heads


async def called(url: str) -> HttpAnswer:
    return await http_call("GET", url, answer_within_s=20.0)


def test_the_proxy_of_the_environment_leads_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with proxy(monkeypatch, "near.invalid") as heads:
            assert (await called("http://api.invalid/x")).status == 200
            secret = base64.b64encode(b"user:secret")
            assert heads[0].startswith(b"GET http://api.invalid/x HTTP/1.1\r\n")
            assert b"Proxy-Authorization: Basic " + secret in heads[0]
            with pytest.raises(Retry, match="503") as refused:
                await called("https://api.invalid/x")
            assert "secret" not in str(refused.value)
            assert heads[1].startswith(b"CONNECT api.invalid:443 ")
            sandbox = RemoteSandbox("https://boxes.invalid", "token", SandboxSpec())
            with pytest.raises(SandboxSilent, match="503"):
                await sandbox.put("a", b"")
            await sandbox.stop()
            assert heads[2].startswith(b"CONNECT boxes.invalid:443 ")
            with pytest.raises(Retry, match="ClientConnector"):
                await called("http://near.invalid/x")  # no such host, and none was asked of the proxy
            assert len(heads) == 3

    asyncio.run(body())


def test_no_proxy_leads_to_this_machine_or_within_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async def answer(request: web.Request) -> web.Response:
            return web.json_response({"here": True})

        app = web.Application()
        app.router.add_route("*", "/{any}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with proxy(monkeypatch) as heads:
            for host in ("127.0.0.1", "localhost"):
                assert (await called(f"http://{host}:{port}/x")).json() == {"here": True}
            async with cluster_session() as session, session.get(f"http://127.0.0.1:{port}/x") as got:
                assert await got.json() == {"here": True}
            assert proxy_of("http://[::1]:80/") is None and proxy_of("http://127.8.8.8/") is None
            assert heads == []
        await runner.cleanup()

    asyncio.run(body())


def test_every_client_is_made_in_one_module() -> None:
    made = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if text.split(".")[-1] in ("ClientSession", "urlopen", "build_opener", "HTTPConnection", "AsyncClient"):
                made.append(path.name)
    assert set(made) == {"http_client.py"}
