"""The HTTP client of one engine, of any kind: its steps, its moves of KV, and its weights."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.engines import wire
from heddle_dask.engines.address import EngineAddress
from heddle_dask.engines.connection import JSON_HEADERS, EngineConnection, payload
from heddle_dask.engines.contract import (
    EngineRefused,
    GenerateRequest,
    GenerateResult,
    KvHandle,
    KvImport,
    WeightInstallation,
)
from heddle_dask.engines.dialect import Dialect, ReadingDialect, StreamingDialect
from heddle_dask.engines.kv_transfer import KvTransferClient
from heddle_dask.engines.weight_update import WeightUpdateClient
from heddle_dask.http_client import failures

if TYPE_CHECKING:
    import aiohttp


class EngineClient(EngineConnection):
    """Async HTTP client of one engine; belongs to the event loop that first used it.

    Its parameters are those of `EngineConnection`.
    """

    def __init__(self, address: EngineAddress, dialect: Dialect = wire, **timeouts: float) -> None:
        super().__init__(address, dialect, **timeouts)
        self._steps_ended = 0
        self._updates = WeightUpdateClient(self.ask, dialect)
        self._transfers = KvTransferClient(self, self._updates, dialect)

    @property
    def steps_ended(self) -> int:
        """Steps that the engine ran to their end. An abort is none: a front end answers it without the engine."""
        return self._steps_ended

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[list[int]], None] | None = None
    ) -> GenerateResult:
        """Run one LLM step and wait for its end, however long it takes.

        Cancelling the call closes the connection, and the engine drops the request.

        Parameters
        ----------
        on_tokens
            Takes tokens of a request that `streams` as they come, where the engine sends them before its answer.

        Raises
        ------
        EngineUnreachable
            The engine did not answer, the connection broke, or the engine failed internally.
        EngineRefused
            The engine declined the request; carries its message.
        """
        with self._flying(request.request_id):
            result = await self._generate(self._dialect.generate_body(request), on_tokens)
        self._steps_ended += result.finish_reason != "abort"
        return result

    async def read_reply(self, tools: str, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Mapping[str, Any]:
        """Have the engine's own parsers read a reply: the assistant's message, with ``content`` and ``tool_calls``.

        Raises
        ------
        EngineUnreachable, EngineRefused
            As `generate`; an engine that reads no replies refuses.
        """
        dialect = self._dialect
        if not isinstance(dialect, ReadingDialect):
            raise EngineRefused(f"engine at {self.address} reads no replies: start vLLM with tool-call-parser")
        return dialect.message_of_answer(
            await self.ask(dialect.READ_PATH, dialect.read_body(tools, prompt_ids, token_ids))
        )

    async def export_kv(self, request_id: str, token_ids: Sequence[int]) -> KvHandle:
        """Have this engine keep the KV of a context for another engine to fetch.

        A step of one token: cheap when the context is in the prefix cache, else its whole prefill. Like those of
        `import_kv` and `warm` it precedes every step that waits in the engine, because a trajectory waits for it.

        Raises
        ------
        KvTransferFailed
            ``unsupported`` or ``source`` (this engine did not answer).
        EngineRefused
            The engine does not accept the context.
        """
        return await self._transfers.export_kv(request_id, token_ids)

    async def import_kv(self, request_id: str, token_ids: Sequence[int], handle: KvHandle) -> KvImport:
        """Fetch the KV that another engine keeps; the next step with this context finds it in this engine's cache.

        A step of one token that always ends by `handle.expires_s`. A handle is valid for one import.

        Raises
        ------
        KvTransferFailed
            For every cause. This engine then holds no wrong KV and can be warmed.
        EngineRefused
            The engine does not accept the context.
        """
        return await self._transfers.import_kv(request_id, token_ids, handle)

    async def warm(self, token_ids: Sequence[int], request_id: str) -> KvImport:
        """Have this engine compute the KV of a context: a plain step of one token."""
        return await self._transfers.warm(request_id, token_ids)

    # -- weights -----------------------------------------------------------------------------------

    @property
    def version(self) -> PolicyVersion:
        """The weights that the engine samples with, as this client set them."""
        return self._updates.version

    @property
    def keeps_kv(self) -> bool:
        """Whether the latest change of weights kept the KV, so that KV of other weights is good enough."""
        return self._updates.keeps_kv

    @property
    def is_updating(self) -> bool:
        """Whether a change of weights is under way."""
        return self._updates.is_updating

    async def install_weights(
        self,
        directory: str | None,
        version: PolicyVersion,
        *,
        keep_kv: bool = False,
        load_timeout_s: float = 600.0,
    ) -> WeightInstallation:
        """Pause the engine, load the weights of a model directory, resume it. Steps in flight go on.

        Parameters
        ----------
        directory
            On the engine's machine; verified before. None: what the engine itself has received.
        keep_kv
            Steps in flight and cached prefixes keep the KV that the old weights computed; else it is recomputed.
        load_timeout_s
            Longest time for loading.

        Raises
        ------
        WeightUpdateFailed
            It says whether the engine must be restarted.
        """
        return await self._updates.install(directory, version, keep_kv=keep_kv, load_timeout_s=load_timeout_s)

    async def label_weights(self, version: PolicyVersion) -> None:
        """Tell an engine which version it was started with: it labels the tokens that it samples."""
        await self._updates.label(version)

    @contextlib.contextmanager
    def _streaming(self, response: aiohttp.ClientResponse) -> Iterator[None]:
        self._streams.add(response)
        try:
            yield
        finally:
            self._streams.discard(response)

    async def _generate(self, body: bytes, on_tokens: Callable[[list[int]], None] | None) -> GenerateResult:
        submitted = time.monotonic()
        try:
            async with self._open().post(
                self._generate_url,
                data=payload(body),
                headers=JSON_HEADERS,
                timeout=self._step_timeout,
            ) as response:
                if response.status != 200:
                    raise self._dialect.error_of_answer(response.status, await response.read())
                if response.content_type != "text/event-stream":
                    return self._dialect.result_of_json(await response.read())
                with self._streaming(response):
                    first = await response.content.readany()
                    first_at = time.monotonic()
                    if on_tokens is None or not isinstance(self._dialect, StreamingDialect):
                        answer = first + await response.content.read()
                    else:
                        answer = await _told(first, response, self._dialect, on_tokens)
        except failures() as error:
            raise self._unreachable(error) from error
        return self._dialect.result_of_stream(answer, first_at - submitted, time.monotonic() - first_at)


async def _told(
    first: bytes, response: aiohttp.ClientResponse, dialect: StreamingDialect, on_tokens: Callable[[list[int]], None]
) -> bytes:
    """The whole of a stream that began with `first`; tells of the tokens of each whole event as it comes."""
    pieces, open_event = [first], first
    while True:
        events, end, rest = open_event.rpartition(b"\n\n")
        if end:
            open_event = rest
            if tokens := dialect.tokens_of_events(events + end):
                on_tokens(tokens)
        piece = await response.content.readany()
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        open_event += piece
