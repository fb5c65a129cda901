"""HTTP with the process of a model service: JSON over a Unix socket."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from heddle_dask.engines.address import EngineAddress
from heddle_dask.engines.client import connector_to
from heddle_dask.engines.model_services.backend import ServiceFailed, ServiceRefused

_CAUSE_CHARACTERS = 300


class ServiceClient:
    """Questions to one process; belongs to the event loop that first used it.

    Parameters
    ----------
    name, noun
        What it is and what it is called, for messages.
    """

    def __init__(self, name: str, address: EngineAddress, noun: str = "service") -> None:
        self._name = f"{noun} {name}"
        self._address = address
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """The parsed answer; None for an empty one.

        Raises
        ------
        ServiceFailed
            No answer, or the process failed.
        ServiceRefused
            It declined the request (a 4xx answer).
        """
        if self._session is None:
            # vLLM closes idle connections after 5 s; ours must go before.
            self._session = aiohttp.ClientSession(
                connector=connector_to(self._address, limit=0, keepalive_timeout=3.0),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        try:
            async with self._session.request(
                method,
                self._address.url + path,
                json=body,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0),
            ) as response:
                text, status = await response.text(), response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServiceFailed(
                f"{self._name} does not answer: {type(error).__name__} {error}".rstrip()
            ) from error
        if status == 200:
            return json.loads(text) if text.strip() else None
        message = f"{self._name}: {_message(text) or f'HTTP status {status}'}"
        raise (ServiceRefused if 400 <= status < 500 else ServiceFailed)(message)

    async def healthy(self) -> bool:
        """Whether it answers."""
        try:
            await self.ask("GET", "/health", timeout_s=5.0)
        except (ServiceFailed, ServiceRefused):
            return False
        return True

    async def close(self) -> None:
        """Close the connections; requests in flight end with `ServiceFailed`."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _message(text: str) -> str:
    """The message of an error's body, in one line: ours, or that of an OpenAI-like server."""
    try:
        body = json.loads(text)
        error = body.get("error", body) if isinstance(body, dict) else body
        found = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        found = text
    return " ".join(str(found).split())[:_CAUSE_CHARACTERS]
