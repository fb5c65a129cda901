"""Contexts of a rollout worker: kept, so that a step need only bring its delta, and brought from other workers.

The driver owns the token record; a cached context is a copy that may be dropped at any time. A base is recognised by
its length and CRC-32, so a copy that has diverged is a miss and never a wrong prompt.

A step that runs elsewhere now fetches its context; a move brings it with its KV cache.
The scheduler plugin orders a move from the target's worker, which reports its end once, whether it succeeded or failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from distributed import Worker

from heddle_dask.core.events import MoveEnded
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import (
    EngineRefused,
    EngineUnreachable,
    KvHandle,
    KvTransferFailed,
)
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

_LOG = logging.getLogger(__name__)
# A step waits so long for its context from another worker, then for all of it from the driver.
FETCH_S = 5.0


Ids = npt.NDArray[np.int32]
EMPTY: Ids = np.zeros(0, dtype="<i4")


def crc_of(data: bytes, start: int = 0) -> int:
    """CRC-32 of little-endian int32 ids; `start` is the CRC of what precedes them."""
    return zlib.crc32(data, start)


@dataclass(frozen=True, slots=True)
class CachedContext:
    """Token ids and their CRC-32."""

    token_ids: Ids
    crc: int

    def extended(self, delta: bytes) -> CachedContext:
        """This context followed by the ids in `delta`."""
        ids = np.concatenate([self.token_ids, np.frombuffer(delta, dtype="<i4")])
        return CachedContext(ids, crc_of(delta, self.crc))

    @classmethod
    def of(cls, data: bytes) -> CachedContext:
        """The context of these little-endian int32 ids."""
        return cls(EMPTY, 0).extended(data)

    def is_base(self, tokens: int, crc: int) -> bool:
        """Whether this is the context of that length and checksum."""
        return len(self.token_ids) == tokens and self.crc == crc


class ContextCache:
    """Least recently used contexts, up to `capacity_tokens` together."""

    def __init__(self, capacity_tokens: int = 64_000_000) -> None:
        self.capacity_tokens = capacity_tokens
        self.tokens = 0
        self._contexts: OrderedDict[tuple[str, str], CachedContext] = OrderedDict()

    def get(self, session: str, trajectory_id: str) -> CachedContext | None:
        """The context held for the trajectory, if any."""
        context = self._contexts.get((session, trajectory_id))
        if context is not None:
            self._contexts.move_to_end((session, trajectory_id))
        return context

    def put(self, session: str, trajectory_id: str, context: CachedContext) -> None:
        """Hold this context in place of an older one of the trajectory."""
        self.drop(session, trajectory_id)
        self._contexts[(session, trajectory_id)] = context
        self.tokens += len(context.token_ids)
        while self.tokens > self.capacity_tokens and len(self._contexts) > 1:
            _, oldest = self._contexts.popitem(last=False)
            self.tokens -= len(oldest.token_ids)

    def drop(self, session: str, trajectory_id: str) -> None:
        """Forget the trajectory."""
        context = self._contexts.pop((session, trajectory_id), None)
        if context is not None:
            self.tokens -= len(context.token_ids)


class EngineOwner(Protocol):
    """What a context mover needs of the rollout worker."""

    worker: Worker | None
    engine_id: str

    @property
    def client(self) -> EngineClient | None:
        """The client of the engine that answers now, if any."""


class ContextMover:
    """Brings contexts to one rollout worker, and hands them to others."""

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
