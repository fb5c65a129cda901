"""The HTTP connection to one engine, of any kind: requests and answers are those of the kind's `Dialect`.

Every failure is one of two errors: `EngineUnreachable` (try again or elsewhere) or `EngineRefused` (this request will
never be accepted). A step may take any time, since a step of 30,000 tokens is ordinary; only connecting, health,
description and abort have timeouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from heddle_dask import http_client
from heddle_dask.engines import wire
from heddle_dask.engines.address import EngineAddress
from heddle_dask.engines.contract import CANARY_REQUEST_ID, FIRST, EngineInfo, EngineRefused, EngineUnreachable
from heddle_dask.engines.dialect import Dialect

if TYPE_CHECKING:
    import aiohttp

JSON_HEADERS = {"Content-Type": "application/json"}
# vLLM closes idle connections after 5 s. The client must close them earlier: a request written to a connection that the
# engine is closing is lost, and a step must not be sent twice.
_KEEPALIVE_S = 3.0
_FIRST_ABORT_GAP_S = 0.01
_LONGEST_ABORT_GAP_S = 0.25
_LARGE_BODY_BYTES = 1 << 20


class EngineConnection:
    """Async HTTP connection to one engine; belongs to the event loop that first used it.

    Parameters
    ----------
    question_timeout_s
        Bound for health, description and abort (not for steps, which have none).
    """

    def __init__(
        self,
        address: EngineAddress,
        dialect: Dialect = wire,
        *,
        connect_timeout_s: float = http_client.CONNECT_S,
        question_timeout_s: float = 10.0,
    ) -> None:
        self._address = address
        self._dialect = dialect
        self._generate_url = address.url + dialect.GENERATE_PATH
        self._step_timeout = http_client.time_limit(None, connect_timeout_s)
        self._question_timeout = http_client.time_limit(question_timeout_s, connect_timeout_s)
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False
        self._configuration: Mapping[str, Any] | None = None
        self._in_flight: dict[str, asyncio.Future[None]] = {}
        self._streams: set[aiohttp.ClientResponse] = set()

    @property
    def address(self) -> EngineAddress:
        return self._address

    @property
    def steps_in_flight(self) -> int:
        """Requests for steps that have no answer yet, without a canary."""
        return len(self._in_flight) - (CANARY_REQUEST_ID in self._in_flight)

    async def ask(self, path: str, body: bytes | None = None, timeout_s: float | None = None) -> bytes:
        """Send a POST request; returns the answer's bytes.

        Parameters
        ----------
        timeout_s
            None: `question_timeout_s`.
        """
        return await self._question("POST", path, body, timeout_s)

    async def one_token_step(self, request_id: str, body: bytes) -> bytes:
        """Send a `Dialect.one_token_body`; returns the answer's bytes. `abort` finds it."""
        with self._flying(request_id):
            return await self._answered("POST", self._generate_url, body, self._step_timeout)

    async def canary(self) -> None:
        """Run a step of one token, before all steps that wait; waits as long as it takes."""
        body = self._dialect.one_token_body(CANARY_REQUEST_ID, [1], FIRST, None)
        await self.one_token_step(CANARY_REQUEST_ID, body)

    async def progress(self) -> tuple[float, ...]:
        """Numbers of which one changes when the engine works on steps; see `Dialect.progress_of_answer`."""
        answer = await self._question("GET", self._dialect.COUNTERS_PATH)
        return self._dialect.progress_of_answer(answer)

    async def configuration(self, timeout_s: float | None = None) -> Mapping[str, Any]:
        """The engine's configuration, in its own words; asked once, since an engine answers between two iterations.

        Parameters
        ----------
        timeout_s
            None: `question_timeout_s`.
        """
        if self._configuration is None:
            dialect = self._dialect
            method = "GET" if dialect.CONFIGURATION_BODY is None else "POST"
            answer = await self._question(method, dialect.CONFIGURATION_PATH, dialect.CONFIGURATION_BODY, timeout_s)
            self._configuration = dialect.configuration_of_answer(answer)
        return self._configuration

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests early; their `generate` calls return what they have, reason ``"abort"``.

        Unknown ids are ignored. An engine forgets an abort that arrives before its request, so the abort of a request
        of this client is repeated until that request has ended.
        """
        # An empty list would abort every request of the engine.
        names, gap_s = list(request_ids), _FIRST_ABORT_GAP_S
        while names:
            await self._question("POST", self._dialect.ABORT_PATH, self._dialect.abort_body(names))
            waiting = [self._in_flight[name] for name in names if name in self._in_flight]
            if waiting:
                await asyncio.wait(waiting, timeout=gap_s)
            names = [name for name in names if name in self._in_flight]
            gap_s = min(2 * gap_s, _LONGEST_ABORT_GAP_S)

    async def healthy(self) -> bool:
        """True when the engine reports that it can serve; False for any other answer, and for none."""
        try:
            await self._question("GET", self._dialect.HEALTH_PATH)
        except (EngineRefused, EngineUnreachable):
            return False
        return True

    async def describe(self, timeout_s: float | None = None) -> EngineInfo:
        """The engine's description of itself.

        Parameters
        ----------
        timeout_s
            None: `question_timeout_s`.

        Raises
        ------
        EngineUnreachable
            The engine did not answer.
        EngineRefused
            The engine has no such endpoint (vLLM without ``VLLM_SERVER_DEV_MODE=1``).
        """
        models = await self._question("GET", self._dialect.MODELS_PATH, timeout_s=timeout_s)
        return self._dialect.info_of_answers(models, await self.configuration(timeout_s))

    async def close(self) -> None:
        """Close all connections; steps in flight, and questions after it, end with `EngineUnreachable`."""
        self._is_closed = True
        # aiohttp closes their connections with the session, and lets their readers wait for ever.
        for response in list(self._streams):
            response.close()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _question(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float | None = None
    ) -> bytes:
        timeout = self._question_timeout if timeout_s is None else http_client.time_limit(timeout_s)
        return await self._answered(method, self._address.url + path, body, timeout)

    async def _answered(self, method: str, url: str, body: bytes | None, timeout: aiohttp.ClientTimeout) -> bytes:
        try:
            async with self._open().request(
                method, url, data=payload(body), headers=JSON_HEADERS, timeout=timeout
            ) as response:
                answer = await response.read()
                if response.status != 200:
                    raise self._dialect.error_of_answer(response.status, answer)
                return answer
        except http_client.failures() as error:
            raise self._unreachable(error) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise EngineUnreachable(f"engine at {self._address} is unreachable: its client is closed")
        if self._session is None:
            self._session = http_client.cluster_session(
                self._address.socket, keepalive_s=_KEEPALIVE_S, read_bufsize=1 << 20, auto_decompress=False
            )
        return self._session

    def _unreachable(self, error: BaseException) -> EngineUnreachable:
        cause = str(error) or type(error).__name__
        return EngineUnreachable(f"engine at {self._address} is unreachable: {cause}")

    @contextlib.contextmanager
    def _flying(self, request_id: str) -> Iterator[None]:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._in_flight[request_id] = ended
        try:
            yield
        finally:
            if self._in_flight.get(request_id) is ended:
                del self._in_flight[request_id]
            if not ended.done():
                ended.set_result(None)


def payload(body: bytes | None) -> bytes | io.BytesIO | None:
    # aiohttp warns about large bodies given as bytes, such as a context of 150,000 tokens.
    return body if body is None or len(body) < _LARGE_BODY_BYTES else io.BytesIO(body)
