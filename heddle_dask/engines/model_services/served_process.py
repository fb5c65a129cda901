"""The process of a model service or a trainer: started when needed, asked over a Unix socket, found dead when it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from heddle_dask.engines import watchdog
from heddle_dask.engines.address import EngineAddress, engines_directory, private_directory, socket_address
from heddle_dask.engines.health import USUAL, HealthLimits, Tell, until_silent
from heddle_dask.engines.model_services.spec import ServiceFailed, ServiceRefused
from heddle_dask.engines.process import likely_cause
from heddle_dask.engines.supervised_process import SupervisedProcess
from heddle_dask.http_client import cluster_session, failures, time_limit

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
_CAUSE_CHARACTERS = 300


class ServiceClient:
    """Questions to one process; belongs to the event loop that first used it.

    Parameters
    ----------
    name, noun
        What it is and what it is called, for messages.
    keeps
        Connections for later questions, until `close`. A pickled client keeps none: nothing closes it elsewhere.
    """

    def __init__(self, name: str, address: EngineAddress, noun: str = "service", keeps: bool = True) -> None:
        self._name = f"{noun} {name}"
        self._told_by = name, address, noun
        self._address = address
        self._keeps = keeps
        self._session: aiohttp.ClientSession | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self._told_by, False)

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[aiohttp.ClientSession]:
        session = self._session
        if session is None:
            # vLLM closes idle connections after 5 s; ours must go before.
            session = cluster_session(self._address.socket, keepalive_s=3.0)
        if self._keeps:
            self._session = session
            yield session
        else:
            async with session:
                yield session

    async def ask(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """The parsed answer; None for an empty one.

        Raises
        ------
        ServiceFailed
            No answer, or the process failed.
        ServiceRefused
            It declined the request (a 4xx answer).
        """
        timeout = time_limit(timeout_s)
        try:
            async with (
                self._connected() as session,
                session.request(method, self._address.url + path, json=body, timeout=timeout) as response,
            ):
                text, status = await response.text(), response.status
        except failures() as error:
            raise ServiceFailed(f"{self._name} does not answer: {type(error).__name__} {error}".rstrip()) from error
        if status == 200:
            return json.loads(text) if text.strip() else None
        message = f"{self._name}: {_message(text) or f'HTTP status {status}'}"
        raise (ServiceRefused if 400 <= status < 500 else ServiceFailed)(message)

    async def healthy(self) -> bool:
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


_POLL_S = 0.05


class ProcessEnded(ServiceFailed):
    """The process itself has ended, or answers no more."""


class ServedProcess:
    """One process that serves one model, from its launch to its end; it is never started twice.

    Parameters
    ----------
    name
        For messages and its log.
    records
        Directory of its socket and of the record of its processes; None: that of all of this user's engines.
    tell
        Called when it is silent for a while, before it is lost.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        records: Path | None = None,
        *,
        noun: str = "service",
        limits: HealthLimits = USUAL,
        tell: Tell = lambda line: None,
    ) -> None:
        self.name = name
        self._limits = limits
        self._tell = tell
        self._noun = noun
        self._directory = directory
        self._records = engines_directory() if records is None else private_directory(records)
        self._mark = secrets.token_hex(8)
        self.address: EngineAddress = socket_address(self._records, watchdog.socket_name(self._mark))
        self.client = ServiceClient(name, self.address, noun)
        self._supervised: SupervisedProcess | None = None

    @property
    def process_id(self) -> int:
        return 0 if self._supervised is None else self._supervised.program_pid

    @property
    def runs(self) -> bool:
        return self._supervised is not None and self._supervised.returncode is None

    @property
    def returncode(self) -> int | None:
        return None if self._supervised is None else self._supervised.returncode

    @property
    def last_line(self) -> str:
        tail = () if self._supervised is None else self._supervised.log_tail(1)
        return tail[-1] if tail else ""

    async def start(self, argv: Sequence[str], env: Mapping[str, str], timeout_s: float) -> None:
        """Launch it, and wait until it answers.

        Raises
        ------
        ServiceFailed
            It ended, or does not answer in time; the message names the cause that its log gives.
        """
        self._supervised = SupervisedProcess(
            argv,
            self._directory,
            f"{self._noun}-{self.name}",
            env=env,
            records=self._records,
            mark=self._mark,
        )
        await self._supervised.clear_stale()
        self._supervised.launch()
        deadline = time.monotonic() + timeout_s
        while not await self.client.healthy():
            if self._supervised.returncode is not None:
                raise ServiceFailed(f"{self._noun} {self.name} ended while it started{self._said()}")
            if time.monotonic() >= deadline:
                raise ServiceFailed(f"{self._noun} {self.name} did not answer within {timeout_s:g} s{self._said()}")
            await asyncio.sleep(_POLL_S)

    async def ended(self) -> str:
        """Wait until it ends, or answers no more; returns the cause in one line."""
        assert self._supervised is not None
        name, stopped = f"{self._noun} {self.name}", self._supervised.is_stopped
        silence = until_silent(name, self.client.healthy, stopped, self._limits, self._tell)
        exited, silent = asyncio.ensure_future(self._supervised.wait()), asyncio.ensure_future(silence)
        try:
            await asyncio.wait((exited, silent), return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                return f"the process of {name} ended (exit code {exited.result()}){self._said()}"
            return f"{name} is lost: {silent.result()}{self._said()}"
        finally:
            exited.cancel()
            silent.cancel()

    async def unless_ended(self, order: Coroutine[Any, Any, T]) -> T:
        """What an order to it returns.

        Raises
        ------
        ProcessEnded
            It has ended, or answers no more.
        """
        answer, ended = asyncio.ensure_future(order), asyncio.ensure_future(self.ended())
        try:
            await asyncio.wait((answer, ended), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ProcessEnded(ended.result())
            return answer.result()
        finally:
            answer.cancel()
            ended.cancel()

    def _said(self) -> str:
        assert self._supervised is not None
        cause = likely_cause(self._supervised.log_tail(200))
        return f": {cause} (log: {self._supervised.log_path})" if cause else ""

    async def stop(self) -> None:
        await self.client.close()
        if self._supervised is not None:
            await self._supervised.stop()
