"""Contexts between rollout workers: fetched by a step that runs elsewhere now, or moved with their KV cache.

The scheduler plugin orders a move from the target's worker, which reports its end once, whether it succeeded or failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from distributed import Worker

from heddle_dask.core.events import MoveEnded
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import EngineRefused, EngineUnreachable, KvHandle, KvTransferFailed
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.live.wire.codec import Message
from heddle_dask.live.wire.envelopes import UNSTAMPED, Report
from heddle_dask.live.wire.messages import StepCall
from heddle_dask.live.wire.transport import ask_worker
from heddle_dask.live.wire.worker_messages import (
    ContextTokens,
    ExportContext,
    ExportedContext,
    MoveContextOrder,
    TakeContext,
)
from heddle_dask.live.worker.context_cache import CachedContext, ContextCache
from heddle_dask.live.worker.engine_host import EngineHost

_LOG = logging.getLogger(__name__)
# A step waits so long for its context from another worker, then for all of it from the driver.
FETCH_S = 5.0


class EngineOwner(Protocol):
    """What is needed of the rollout worker to move contexts and to keep weights."""

    worker: Worker | None
    engine_id: str
    spec: EngineSpec

    @property
    def client(self) -> EngineClient | None:
        """The client of the engine that answers now, if any."""

    @property
    def host(self) -> EngineHost | None:
        """The supervision of the engine, if any."""


class ContextMover:
    def __init__(self, owner: EngineOwner, contexts: ContextCache, report: Callable[[Message], None]) -> None:
        self._owner = owner
        self._contexts = contexts
        self._report = report

    # -- at the source -----------------------------------------------------------------------------

    async def take(self, request: TakeContext) -> ContextTokens:
        """Hand over a context; this worker does not hold it any more."""
        context = self._contexts.get(request.session, request.trajectory_id)
        self._contexts.drop(request.session, request.trajectory_id)
        return ContextTokens(None if context is None else context.token_ids.tobytes())

    async def export(self, request: ExportContext) -> ExportedContext:
        """The ids of a context, and a handle for its KV cache when that is to be transferred.

        The context stays here until the scheduler orders this worker to drop it.
        """
        context = self._contexts.get(request.session, request.trajectory_id)
        if context is None:
            return ExportedContext(cause="its context is not on the source any more")
        token_ids = context.token_ids.tobytes()
        if not request.transfer:
            return ExportedContext(token_ids)
        client = self._owner.client
        if client is None:
            return ExportedContext(cause="the source engine is gone")
        try:
            name = f"export-{request.session}-{request.trajectory_id}-{len(context.token_ids)}"
            handle = await client.export_kv(name, context.token_ids.tolist())
        except (KvTransferFailed, EngineRefused, EngineUnreachable) as error:
            return ExportedContext(cause=f"export failed: {error}")
        return ExportedContext(token_ids, handle.to_mapping())

    # -- at the target -----------------------------------------------------------------------------

    async def context_for(self, call: StepCall, source: str | None) -> CachedContext | None:
        """The whole context of a step: its delta alone, or after a base held here or at the worker before."""
        if call.base_tokens == 0:
            return CachedContext.of(call.delta)
        base = self._contexts.get(call.session, call.step_id.trajectory_id)
        if base is None or not base.is_base(call.base_tokens, call.base_crc):
            base = await self._fetch(call, source)
        return None if base is None else base.extended(call.delta)

    async def _fetch(self, call: StepCall, source: str | None) -> CachedContext | None:
        worker = self._owner.worker
        if worker is None or source is None or source == worker.address:
            return None
        taking = ask_worker(worker, source, TakeContext(call.session, call.step_id.trajectory_id))
        try:
            # Dask would try for half a minute to reach a worker that has left.
            answer = await asyncio.wait_for(taking, FETCH_S)
        except (OSError, AttributeError):  # a TimeoutError is an OSError
            return None  # that worker has left; the driver sends the whole context
        if answer.token_ids is None:
            return None
        base = CachedContext.of(answer.token_ids)
        return base if base.is_base(call.base_tokens, call.base_crc) else None

    async def move(self, order: MoveContextOrder) -> None:
        """Bring the context here and report."""
        command, began_s = order.command, time.perf_counter()
        try:
            tokens, cause = await self._move(order)
        except Exception as error:
            # Unforeseen: without a report the trajectory would wait for the end of its move for ever.
            _LOG.exception("a move of %s failed", command.trajectory_id)
            tokens, cause = 0, f"{type(error).__name__}: {error}"
        ended = MoveEnded(
            UNSTAMPED,
            trajectory_id=command.trajectory_id,
            target_engine_id=command.target_engine_id,
            ok=not cause,
            kind=command.kind,
            seconds=time.perf_counter() - began_s,
            tokens=tokens,
            cause=cause,
            source_engine_id=command.source_engine_id,
        )
        self._report(Report(order.session, ended))

    async def _move(self, order: MoveContextOrder) -> tuple[int, str]:
        """Tokens brought, and why it failed."""
        client, worker, command = self._owner.client, self._owner.worker, order.command
        if client is None or worker is None or command.target_engine_id != self._owner.engine_id:
            return 0, "the target engine is gone"
        if not order.source:
            return 0, "the source worker is gone"
        transfer = command.kind == "transfer"
        asked_s = time.monotonic()
        try:
            exported = await ask_worker(
                worker, order.source, ExportContext(order.session, command.trajectory_id, transfer)
            )
        except (OSError, AttributeError) as error:
            return 0, f"the source worker is gone: {error}"
        if exported.cause:
            return 0, exported.cause
        context = CachedContext.of(exported.token_ids)
        ids = context.token_ids.tolist()
        name = f"import-{order.session}-{command.trajectory_id}-{len(ids)}"
        try:
            if exported.handle is not None:
                await client.import_kv(name, ids, KvHandle.from_mapping(exported.handle, asked_s))
            else:
                await client.warm(ids, name)
        except (KvTransferFailed, EngineRefused, EngineUnreachable) as error:
            return 0, str(error)
        self._contexts.put(order.session, command.trajectory_id, context)
        return len(ids), ""
