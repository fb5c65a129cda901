"""The client's side of moving KV between engines, and the checks that engines do not make.

A target does not validate a handle. It silently takes wrong data for the KV of the context when a handle is used a
second time, after the source freed the blocks, for another context, or with blocks larger than the source's. A context
longer than the exported one crashes the target. Such calls are therefore refused here, before they are sent, and an
import that still waits shortly before the source frees the blocks is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from heddle_dask.engines.connection import EngineConnection
from heddle_dask.engines.contract import (
    FIRST,
    EngineUnreachable,
    KvFacts,
    KvHandle,
    KvImport,
    KvTransferFailed,
    context_digest,
)
from heddle_dask.engines.dialect import Dialect, KvDialect
from heddle_dask.engines.weight_update import WeightUpdateClient

# A third of the lease is reserved for the abort of an overdue import to arrive.
_USABLE_SHARE = 2 / 3
# Timeout of the abort of an overdue import, after which the target counts as dead.
_ABORT_ANSWER_S = 5.0


class KvTransferClient:
    """Exports from, imports to and warm-ups of one engine; see `EngineClient` for the promises."""

    def __init__(self, engine: EngineConnection, weights: WeightUpdateClient, dialect: Dialect) -> None:
        self._engine = engine
        self._weights = weights
        self._dialect = dialect
        self._kv = dialect if isinstance(dialect, KvDialect) else None
        self._facts: KvFacts | None = None
        # Handles imported here, by the source's name for them, and the monotonic time until which they are valid.
        self._used: dict[tuple[str, str], float] = {}

    async def export_kv(self, request_id: str, token_ids: Sequence[int]) -> KvHandle:
        try:
            facts = await self._ask()
            assert self._kv is not None  # else it was refused
            # Read before the step: the lease begins at the step's end and so outlasts the handle.
            asked_s = time.monotonic()
            version = self._weights.version
            body = self._dialect.one_token_body(request_id, token_ids, FIRST, self._kv.export_params())
            result, params = self._dialect.transfer_of_json(await self._engine.one_token_step(request_id, body))
        except EngineUnreachable as error:
            raise KvTransferFailed(f"KV was not exported: {error}", "source") from error
        if result.finish_reason == "abort":
            raise KvTransferFailed(f"KV was not exported: {request_id} was aborted", "source")
        if params is None:
            raise self._unsupported()
        if version != self._weights.version and not self._weights.keeps_kv:
            raise KvTransferFailed(
                f"KV was not exported: the weights changed from {version} to {self._weights.version} meanwhile",
                "version",
            )
        return KvHandle(
            source_engine_id=str(params["remote_engine_id"]),
            tokens=len(token_ids),
            digest=context_digest(token_ids),
            block_tokens=facts.block_tokens,
            tp_degree=facts.tp_degree,
            params=dict(params),
            valid_s=facts.lease_s * _USABLE_SHARE,
            asked_s=asked_s,
            version=str(version),
        )

    async def import_kv(self, request_id: str, token_ids: Sequence[int], handle: KvHandle) -> KvImport:
        began_s = time.monotonic()
        try:
            facts = await self._ask()
        except EngineUnreachable as error:
            raise KvTransferFailed(f"KV was not imported: {error}", "target") from error
        self._check(token_ids, handle, facts)
        body = self._dialect.one_token_body(request_id, token_ids, FIRST, handle.params)
        step = asyncio.ensure_future(self._engine.one_token_step(request_id, body))
        try:
            async with asyncio.timeout(handle.expires_s - time.monotonic()):
                result, _ = self._dialect.transfer_of_json(await asyncio.shield(step))
        except TimeoutError:
            await self._give_up(request_id, step)
            raise KvTransferFailed(
                f"KV of {handle.tokens} tokens did not reach {self._engine.address} within its lease",
                "expired",
            ) from None
        except EngineUnreachable as error:
            raise await self._failed(error) from error
        finally:
            step.cancel()
        if result.finish_reason == "abort":
            raise KvTransferFailed(f"import {request_id} was aborted", "expired")
        # vLLM counts only tokens cached before. Engines fail rather than recompute, so a success has imported them all.
        return KvImport(handle.tokens, time.monotonic() - began_s)

    async def warm(self, request_id: str, token_ids: Sequence[int]) -> KvImport:
        began_s = time.monotonic()
        body = self._dialect.one_token_body(request_id, token_ids, FIRST, None)
        result, _ = self._dialect.transfer_of_json(await self._engine.one_token_step(request_id, body))
        return KvImport(result.cached_tokens, time.monotonic() - began_s)

    # ------------------------------------------------------------------ inside

    async def _ask(self) -> KvFacts:
        if self._facts is None:
            facts = self._kv.kv_facts(await self._engine.configuration()) if self._kv is not None else None
            if facts is None:
                raise self._unsupported()
            self._facts = facts
        return self._facts

    def _check(self, token_ids: Sequence[int], handle: KvHandle, facts: KvFacts) -> None:
        """Raise for a handle that the engine would wrongly accept; else mark it as used."""
        if len(token_ids) != handle.tokens or context_digest(token_ids) != handle.digest:
            raise KvTransferFailed(
                f"{len(token_ids)} tokens are not the {handle.tokens} that were exported: export them",
                "mismatch",
            )
        if handle.block_tokens != facts.block_tokens:
            sizes = f"{handle.block_tokens} tokens, those of {self._engine.address} {facts.block_tokens}"
            raise KvTransferFailed(f"KV blocks of {handle.source_engine_id} hold {sizes}", "mismatch")
        if handle.tp_degree != facts.tp_degree:
            degrees = f"degree {handle.tp_degree}, {self._engine.address} at {facts.tp_degree}"
            raise KvTransferFailed(f"{handle.source_engine_id} runs at TP {degrees}", "mismatch")
        if handle.version != str(self._weights.version) and not self._weights.keeps_kv:
            raise KvTransferFailed(
                f"KV of {handle.source_engine_id} is of weights {handle.version}, {self._engine.address} has "
                f"{self._weights.version}",
                "version",
            )
        now_s = time.monotonic()
        name = (handle.source_engine_id, str(handle.params.get("remote_request_id")))
        self._used = {used: until_s for used, until_s in self._used.items() if until_s > now_s}
        if name in self._used:
            raise KvTransferFailed(f"KV of {name[1]} was imported before: export it again", "used")
        if now_s >= handle.expires_s:
            late_s = now_s - handle.expires_s
            raise KvTransferFailed(f"KV of {name[1]} expired {late_s:.1f} s ago: export it again", "expired")
        self._used[name] = handle.expires_s

    async def _give_up(self, request_id: str, step: asyncio.Future[bytes]) -> None:
        """Abort an import and wait for its end: until then it may still read."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_ANSWER_S):
                    await self._engine.abort([request_id])
                    await asyncio.shield(step)
        except EngineUnreachable as error:
            raise await self._failed(error) from error

    async def _failed(self, error: EngineUnreachable) -> KvTransferFailed:
        # The target's error does not name the cause. If the target is healthy, reading from the source failed.
        if await self._engine.healthy():
            return KvTransferFailed(f"KV could not be read from its source: {error}", "source")
        return KvTransferFailed(f"KV was not imported: {error}", "target")

    def _unsupported(self) -> KvTransferFailed:
        return KvTransferFailed(
            f"engine at {self._engine.address} transfers no KV: start it with kv_transfer", "unsupported"
        )
