"""The client's side of moving KV between engines: what is asked of whom, and what must never be asked.

An engine does not check what it is told. A handle used a second time, or after the source let go of the blocks, makes
the target read whatever those blocks hold by then and keep it for the KV of the context, without a word; so does a
handle used for another context, and a target whose blocks are larger than the source's. A longer context ends the
target. Such calls are therefore refused here, before they are sent, and an import that is still waiting when the
source is about to let go is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from heddle_dask.engines import wire
from heddle_dask.engines.contract import (
    EngineUnreachable,
    KvHandle,
    KvImport,
    KvTransferFailed,
    context_digest,
)
from heddle_dask.engines.priority import FIRST

# A third of the lease is left for the abort to arrive and for the clocks of two machines to differ.
_USABLE_SHARE = 2 / 3
# How long an abort of an overdue import may take to be answered before the target counts as dead.
_ABORT_ANSWER_S = 5.0


# vLLM's own, where its command line says nothing.
_VLLM_LEASE_S = 30


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is asked of an engine once: how long a handle may be used, its KV blocks, and its TP degree."""

    usable_s: float
    block_tokens: int
    tp_degree: int


class Engine(Protocol):
    """What is needed of `EngineClient`."""

    @property
    def base_url(self) -> str:
        """Where the engine listens."""
        ...

    async def one_token_step(self, request_id: str, body: bytes) -> bytes:
        """Send a step of one token."""
        ...

    async def configuration(self) -> Mapping[str, Any]:
        """The engine's configuration, in vLLM's words."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests early."""
        ...

    async def healthy(self) -> bool:
        """Whether the engine can serve."""
        ...


class KvTransfers:
    """Exports from, imports to and warm-ups of one engine; see `EngineClient` for the promises."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._facts: _Facts | None = None
        # Handles imported here, by the source's name for them, and until when they could be used again.
        self._used: dict[tuple[str, str], float] = {}

    async def export_kv(self, request_id: str, token_ids: Sequence[int]) -> KvHandle:
        """Pin a context's KV on this engine."""
        try:
            facts = await self._ask()
            # Taken before the step, so that the lease, which begins at its end, outlasts it.
            asked_s = time.time()
            body = wire.one_token_body(request_id, token_ids, FIRST, wire.export_params())
            result, params = wire.transfer_of_json(await self._engine.one_token_step(request_id, body))
        except EngineUnreachable as error:
            raise KvTransferFailed(f"KV was not exported: {error}", "source") from error
        if result.finish_reason == "abort":
            raise KvTransferFailed(f"KV was not exported: {request_id} was aborted", "source")
        if params is None:
            raise self._unsupported()
        return KvHandle(
            source_engine_id=str(params["remote_engine_id"]),
            tokens=len(token_ids),
            digest=context_digest(token_ids),
            block_tokens=facts.block_tokens,
            tp_degree=facts.tp_degree,
            expires_s=asked_s + facts.usable_s,
            params=dict(params),
        )

    async def import_kv(self, request_id: str, token_ids: Sequence[int], handle: KvHandle) -> KvImport:
        """Fetch a context's KV from its source."""
        began_s = time.monotonic()
        try:
            facts = await self._ask()
        except EngineUnreachable as error:
            raise KvTransferFailed(f"KV was not imported: {error}", "target") from error
        self._check(token_ids, handle, facts)
        body = wire.one_token_body(request_id, token_ids, FIRST, handle.params)
        step = asyncio.ensure_future(self._engine.one_token_step(request_id, body))
        try:
            async with asyncio.timeout(handle.expires_s - time.time()):
                result, _ = wire.transfer_of_json(await asyncio.shield(step))
        except TimeoutError:
            await self._give_up(request_id, step)
            raise KvTransferFailed(
                f"KV of {handle.tokens} tokens did not reach {self._engine.base_url} within its lease",
                "expired",
            ) from None
        except EngineUnreachable as error:
            raise await self._failed(error) from error
        finally:
            step.cancel()
        if result.finish_reason == "abort":
            raise KvTransferFailed(f"import {request_id} was aborted", "expired")
        # vLLM counts here only what it had before. Engines are told to fail rather than to recompute, so this is all.
        return KvImport(handle.tokens, time.monotonic() - began_s)

    async def warm(self, request_id: str, token_ids: Sequence[int]) -> KvImport:
        """Compute a context's KV here."""
        began_s = time.monotonic()
        body = wire.one_token_body(request_id, token_ids, FIRST, None)
        result, _ = wire.transfer_of_json(await self._engine.one_token_step(request_id, body))
        return KvImport(result.cached_tokens, time.monotonic() - began_s)

    # ------------------------------------------------------------------ inside

    async def _ask(self) -> _Facts:
        if self._facts is None:
            config = await self._engine.configuration()
            transfer = config.get("kv_transfer_config")
            if transfer is None:
                raise self._unsupported()
            extra = transfer.get("kv_connector_extra_config") or {}
            lease_s = float(extra.get("kv_lease_duration", _VLLM_LEASE_S))
            self._facts = _Facts(
                lease_s * _USABLE_SHARE,
                int(config["cache_config"]["block_size"]),
                int(config["parallel_config"]["tensor_parallel_size"]),
            )
        return self._facts

    def _check(self, token_ids: Sequence[int], handle: KvHandle, facts: _Facts) -> None:
        """Refuse what the engine would take and should not; else count the handle as used."""
        if len(token_ids) != handle.tokens or context_digest(token_ids) != handle.digest:
            raise KvTransferFailed(
                f"{len(token_ids)} tokens are not the {handle.tokens} that were exported: export them",
                "mismatch",
            )
        if handle.block_tokens != facts.block_tokens:
            sizes = f"{handle.block_tokens} tokens, those of {self._engine.base_url} {facts.block_tokens}"
            raise KvTransferFailed(f"KV blocks of {handle.source_engine_id} hold {sizes}", "mismatch")
        if handle.tp_degree != facts.tp_degree:
            degrees = f"degree {handle.tp_degree}, {self._engine.base_url} at {facts.tp_degree}"
            raise KvTransferFailed(f"{handle.source_engine_id} runs at TP {degrees}", "mismatch")
        now_s = time.time()
        name = (handle.source_engine_id, str(handle.params.get("remote_request_id")))
        self._used = {used: until_s for used, until_s in self._used.items() if until_s > now_s}
        if name in self._used:
            raise KvTransferFailed(f"KV of {name[1]} was imported before: export it again", "used")
        if now_s >= handle.expires_s:
            late_s = now_s - handle.expires_s
            raise KvTransferFailed(f"KV of {name[1]} expired {late_s:.1f} s ago: export it again", "expired")
        self._used[name] = handle.expires_s

    async def _give_up(self, request_id: str, step: asyncio.Future[bytes]) -> None:
        """Abort an import and see it end: until then it may still read."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_ANSWER_S):
                    await self._engine.abort([request_id])
                    await asyncio.shield(step)
        except EngineUnreachable as error:
            raise await self._failed(error) from error

    async def _failed(self, error: EngineUnreachable) -> KvTransferFailed:
        # The target says only that something failed. If it lives, it was the reading from the source.
        if await self._engine.healthy():
            return KvTransferFailed(f"KV could not be read from its source: {error}", "source")
        return KvTransferFailed(f"KV was not imported: {error}", "target")

    def _unsupported(self) -> KvTransferFailed:
        return KvTransferFailed(
            f"engine at {self._engine.base_url} hands over no KV: start it with kv_transfer", "unsupported"
        )
