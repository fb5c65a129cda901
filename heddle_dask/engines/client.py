"""The only way to talk to an engine: one HTTP client per engine, for any engine that keeps the contract.

Every failure comes out as one of two errors: `EngineUnreachable` (try again or elsewhere) or
`EngineRefused` (this request will never do). There is no limit on how long a step may take, since a
step of 30,000 tokens is ordinary; only connecting and the small questions are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from heddle_dask.engines import wire
from heddle_dask.engines.contract import (
    EngineInfo,
    EngineRefused,
    EngineUnreachable,
    GenerateRequest,
    GenerateResult,
    KvHandle,
    KvImport,
)
from heddle_dask.engines.kv_transfer import KvTransfers

_JSON_HEADERS = {"Content-Type": "application/json"}
# vLLM closes idle connections after 5 s. Ours must be shorter: a request written to a connection
# that the other side is just closing is lost, and a step must not be sent twice blindly.
_KEEPALIVE_S = 3.0
_FIRST_ABORT_GAP_S = 0.01
_LONGEST_ABORT_GAP_S = 0.25
_LARGE_BODY_BYTES = 1 << 20


class EngineClient:
    """Async HTTP client of one engine; belongs to the event loop that first used it.

    Parameters
    ----------
    base_url
        ``http://host:port``.
    connect_timeout_s
        Bound for opening a connection.
    question_timeout_s
        Bound for health, description and abort (not for `generate`, which has none).
    """

    def __init__(
        self, base_url: str, *, connect_timeout_s: float = 10.0, question_timeout_s: float = 10.0
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._generate_url = self._base_url + "/inference/v1/generate"
        self._step_timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._question_timeout = aiohttp.ClientTimeout(
            total=question_timeout_s, sock_connect=connect_timeout_s
        )
        self._session: aiohttp.ClientSession | None = None
        self._in_flight: dict[str, asyncio.Future[None]] = {}
        self._transfers = KvTransfers(self)

    @property
    def base_url(self) -> str:
        """Where the engine listens."""
        return self._base_url

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Run one LLM step and wait for its end, however long it takes.

        Cancelling the call closes the connection, and the engine drops the request.

        Raises
        ------
        EngineUnreachable
            Nobody answered, the connection broke, or the engine failed inside.
        EngineRefused
            The engine declined the request; carries its message.
        """
        with self._flying(request.request_id):
            return await self._generate(wire.generate_body(request))

    async def export_kv(self, request_id: str, token_ids: Sequence[int]) -> KvHandle:
        """Have this engine keep the KV of a context for another engine to fetch.

        A step of one token: cheap where the context is in the prefix cache, else its prefill. Like those of
        `import_kv` and `warm` it goes before every step that waits in the engine: a trajectory waits for its end.

        Raises
        ------
        KvTransferFailed
            ``unsupported`` or ``source`` (this engine did not answer).
        EngineRefused
            The context is none that the engine takes.
        """
        return await self._transfers.export_kv(request_id, token_ids)

    async def import_kv(self, request_id: str, token_ids: Sequence[int], handle: KvHandle) -> KvImport:
        """Fetch the KV that another engine keeps; the next step with this context finds it here.

        A step of one token that ends by `handle.expires_s`, whatever happens. A handle is for one import.

        Raises
        ------
        KvTransferFailed
            For every cause there is. This engine then holds nothing wrong and can be warmed.
        EngineRefused
            The context is none that the engine takes.
        """
        return await self._transfers.import_kv(request_id, token_ids, handle)

    async def warm(self, token_ids: Sequence[int], request_id: str) -> KvImport:
        """Have this engine compute the KV of a context by itself: a plain step of one token.

        Raises
        ------
        EngineUnreachable, EngineRefused
            As `generate`.
        """
        return await self._transfers.warm(request_id, token_ids)

    async def one_token_step(self, request_id: str, body: bytes) -> bytes:
        """Send a `wire.one_token_body`; returns the answer's bytes. `abort` finds it.

        Raises
        ------
        EngineUnreachable, EngineRefused
            As `generate`.
        """
        with self._flying(request_id):
            return await self._answered("POST", self._generate_url, body, self._step_timeout)

    async def configuration(self) -> Mapping[str, Any]:
        """The engine's whole configuration, in vLLM's words.

        Raises
        ------
        EngineUnreachable, EngineRefused
            As `describe`.
        """
        info = json.loads(await self._question("GET", "/server_info?config_format=json"))
        config: Mapping[str, Any] = info["vllm_config"]
        return config

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

    async def _generate(self, body: bytes) -> GenerateResult:
        submitted = time.monotonic()
        try:
            async with self._open().post(
                self._generate_url,
                data=_payload(body),
                headers=_JSON_HEADERS,
                timeout=self._step_timeout,
            ) as response:
                if response.status != 200:
                    message = wire.error_message(await response.read())
                    raise wire.error_of_status(response.status, message)
                if response.content_type != "text/event-stream":
                    return wire.result_of_json(await response.read())
                first = await response.content.readany()
                first_at = time.monotonic()
                answer = first + await response.content.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error
        return wire.result_of_stream(answer, first_at - submitted, time.monotonic() - first_at)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests early; their `generate` calls return what they have, reason ``"abort"``.

        Ids that the engine does not know are ignored. A request of this client that is still on its
        way is aborted once it has arrived: an engine forgets an abort that overtakes its request, so the
        abort is repeated until the request has ended.

        Raises
        ------
        EngineUnreachable
            Nobody answered.
        """
        # An empty list would abort everything that runs on the engine.
        names, gap_s = list(request_ids), _FIRST_ABORT_GAP_S
        while names:
            await self._question("POST", "/abort_requests", wire.abort_body(names))
            waiting = [self._in_flight[name] for name in names if name in self._in_flight]
            if waiting:
                await asyncio.wait(waiting, timeout=gap_s)
            names = [name for name in names if name in self._in_flight]
            gap_s = min(2 * gap_s, _LONGEST_ABORT_GAP_S)

    async def healthy(self) -> bool:
        """True when the engine says it can serve; False for every other answer, or none."""
        try:
            await self._question("GET", "/health")
        except (EngineRefused, EngineUnreachable):
            return False
        return True

    async def describe(self) -> EngineInfo:
        """What the engine says of itself.

        Raises
        ------
        EngineUnreachable
            Nobody answered.
        EngineRefused
            The engine has no such endpoint (vLLM without ``VLLM_SERVER_DEV_MODE=1``).
        """
        models = json.loads(await self._question("GET", "/v1/models"))
        config = await self.configuration()
        model = models["data"][0]
        return EngineInfo(
            model=model["id"],
            max_model_len=int(model["max_model_len"]),
            slots=int(config["scheduler_config"]["max_num_seqs"]),
            kind="emulated" if model.get("owned_by") == wire.EMULATED_OWNER else "vllm",
            tp_degree=int(config["parallel_config"]["tensor_parallel_size"]),
            kv_capacity_tokens=_kv_capacity_tokens(config.get("cache_config") or {}),
        )

    async def close(self) -> None:
        """Close all connections; steps in flight end with `EngineUnreachable`."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _question(self, method: str, path: str, body: bytes | None = None) -> bytes:
        return await self._answered(method, self._base_url + path, body, self._question_timeout)

    async def _answered(
        self, method: str, url: str, body: bytes | None, timeout: aiohttp.ClientTimeout
    ) -> bytes:
        try:
            async with self._open().request(
                method, url, data=_payload(body), headers=_JSON_HEADERS, timeout=timeout
            ) as response:
                answer = await response.read()
                if response.status != 200:
                    raise wire.error_of_status(response.status, wire.error_message(answer))
                return answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
                read_bufsize=1 << 20,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _unreachable(self, error: BaseException) -> EngineUnreachable:
        cause = str(error) or type(error).__name__
        return EngineUnreachable(f"engine at {self._base_url} is unreachable: {cause}")


def _kv_capacity_tokens(cache_config: Mapping[str, Any]) -> int:
    blocks, block_tokens = cache_config.get("num_gpu_blocks"), cache_config.get("block_size")
    return int(blocks) * int(block_tokens) if blocks and block_tokens else 0


def _payload(body: bytes | None) -> bytes | io.BytesIO | None:
    # aiohttp warns of large bodies as bytes; a context of 150,000 tokens is one.
    return body if body is None or len(body) < _LARGE_BODY_BYTES else io.BytesIO(body)
