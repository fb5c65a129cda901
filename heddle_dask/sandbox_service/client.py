"""A sandbox of a remote service, with the contract of the others; its lease is renewed as long as it is kept.

The renewals show that the service answers: one that is silent for the time of the lease has lost the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import aiohttp

from heddle_dask.core.errors import LINE_CHARACTERS, cut_text
from heddle_dask.http_client import one_line_of, outside_session, time_limit
from heddle_dask.sandbox.stateful.contract import MIB, Command, ExecResult, SandboxFailed, SandboxGone, SandboxSpec

# Beyond the time limit of a command, for the way there and back and for the end of its processes.
_MARGIN_S = 60.0
# Pause between two renewals, at most, and the limit of one; a silence of two is told.
_RENEWAL_S = 5.0


class SandboxSilent(SandboxGone):
    """The service does not answer."""


class RemoteSandbox:
    """See `contract.StatefulSandbox`. The files and the setup of the spec are the caller's task.

    Parameters
    ----------
    address
        Of the service, such as ``http://127.0.0.1:8470``.
    tell
        Called with a line when the service is silent for a while, before the sandbox is lost.
    """

    def __init__(
        self, address: str, token: str, spec: SandboxSpec, tell: Callable[[str], None] = lambda line: None
    ) -> None:
        self._address = address.rstrip("/")
        self._token = token
        self._spec = spec
        self._tell = tell
        self._id = ""
        self._http: aiohttp.ClientSession | None = None
        self._renewing: asyncio.Task[str] | None = None

    async def start(self) -> None:
        body = {"spec": {**self._spec.to_plain(), "files": {}, "setup": []}}
        late = asyncio.get_running_loop().call_later(2 * _RENEWAL_S, self._tell_silent, 2 * _RENEWAL_S)
        try:
            self._take(await self._ask("POST", "/sandboxes", json=body))
        except SandboxGone as error:
            raise SandboxFailed(str(error)) from error
        finally:
            late.cancel()

    def _tell_silent(self, silent_s: float) -> None:
        self._tell(f"sandbox service {self._address} has not answered for {silent_s:g} s")

    def _take(self, answer: dict[str, Any]) -> None:
        self._id = answer["id"]
        self._renewing = asyncio.create_task(self._renew(float(answer["lease_s"])))

    async def _renew(self, lease_s: float) -> str:
        """Renew the lease until the sandbox is lost; returns why."""
        period_s = min(_RENEWAL_S, lease_s / 3)
        answered_s, told = time.monotonic(), False
        while True:
            await asyncio.sleep(period_s)
            try:
                await self._ask("POST", f"/sandboxes/{self._id}/lease", limit_s=period_s)
                if told:
                    self._tell(f"sandbox service {self._address} answers again")
                answered_s, told = time.monotonic(), False
            except SandboxSilent:
                silent_s = time.monotonic() - answered_s
                if silent_s >= lease_s:
                    return f"sandbox service {self._address} has not answered for {silent_s:.0f} s"
                if not told and silent_s >= 2 * period_s:
                    told = True
                    self._tell_silent(2 * period_s)
            except SandboxFailed as error:
                return str(error)

    async def exec(self, command: Command) -> ExecResult:
        renewing, limit_s = self._renewing, command.timeout_s + _MARGIN_S
        assert renewing is not None, "start it first"
        if renewing.done() and not renewing.cancelled():
            raise SandboxGone(renewing.result())
        asked = self._ask("POST", f"/sandboxes/{self._id}/exec", limit_s=limit_s, json=asdict(command))
        request = asyncio.ensure_future(asked)
        try:
            await asyncio.wait({request, renewing}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done() and not renewing.cancelled():
                raise SandboxGone(renewing.result())
            return ExecResult(**await request)
        finally:
            request.cancel()

    async def put(self, path: str, content: bytes) -> None:
        await self._ask("PUT", f"/sandboxes/{self._id}/files", params={"path": path}, data=content)

    async def get(self, path: str, most_bytes: int = 16 * MIB) -> bytes:
        params = {"path": path, "most_bytes": str(most_bytes)}
        content: bytes = await self._ask("GET", f"/sandboxes/{self._id}/files", raw=True, params=params)
        return content

    async def fork(self, name: str) -> RemoteSandbox:
        copy = RemoteSandbox(self._address, self._token, self._spec, self._tell)
        copy._take(await self._ask("POST", f"/sandboxes/{self._id}/fork", json={}))
        return copy

    async def stop(self) -> None:
        """See the contract; a service that does not answer ends it when its lease is over."""
        lost = self._renewing is not None and self._renewing.done()
        if self._renewing is not None:
            self._renewing.cancel()
        name, self._id = self._id, ""
        if name and not lost:
            with contextlib.suppress(SandboxFailed):
                await self._ask("DELETE", f"/sandboxes/{name}")
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _ask(
        self, method: str, path: str, *, raw: bool = False, limit_s: float = _MARGIN_S, **options: Any
    ) -> Any:
        """The answer of the service.

        Raises
        ------
        SandboxFailed
            It refuses; the message says why.
        SandboxGone
            It does not have the sandbox, or (`SandboxSilent`) whether it has done what was asked is unknown.
        """
        if self._http is None:
            self._http = outside_session(self._address, headers={"Authorization": f"Bearer {self._token}"})
        timeout = time_limit(limit_s)
        try:
            async with self._http.request(method, self._address + path, timeout=timeout, **options) as answer:
                if answer.status == 404:
                    raise SandboxGone(f"sandbox: the service {self._address} has it no longer")
                if answer.status >= 400:
                    raise SandboxFailed(f"sandbox service {self._address}: {await _reason(answer)}")
                return await (answer.read() if raw else answer.json())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SandboxSilent(f"sandbox service {self._address} does not answer: {one_line_of(error)}") from error


async def _reason(answer: aiohttp.ClientResponse) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError, aiohttp.ContentTypeError):
        return cut_text(str((await answer.json())["error"]), LINE_CHARACTERS)
    return f"HTTP status {answer.status}"
