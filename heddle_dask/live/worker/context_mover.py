"""The worker's part of a move: brings a trajectory's context and KV cache from another worker to its own engine.

Asked by the scheduler plugin of the *target*; every end, good or bad, is reported, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from distributed import Worker

from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import (
    EngineRefused,
    EngineUnreachable,
    KvHandle,
    KvTransferFailed,
)
from heddle_dask.live.worker.context_cache import EMPTY, CachedContext, ContextCache


class Lodging(Protocol):
    """What the mover needs of the rollout worker."""

    worker: Worker | None
    engine_id: str

    @property
    def client(self) -> EngineClient | None:
        """The client of the engine that answers now, if any."""


class ContextMover:
    """Imports to and exports from the engine of one rollout worker."""

    def __init__(
        self, lodging: Lodging, contexts: ContextCache, tell: Callable[[dict[str, Any]], None]
    ) -> None:
        self._lodging = lodging
        self._contexts = contexts
        self._tell = tell

    async def export(self, session: str, trajectory: str, transfer: bool) -> dict[str, Any]:
        """RPC of the target's worker: the ids held here, and a handle for their KV when it is to be transferred.

        The context stays here until the scheduler says that the move has ended well.
        """
        context = self._contexts.get(session, trajectory)
        if context is None:
            return {"cause": "its context is not on the source any more"}
        answer: dict[str, Any] = {"ids": context.token_ids.tobytes()}
        client = self._lodging.client
        if transfer:
            if client is None:
                return {"cause": "the source engine is gone"}
            try:
                name = f"export-{session}-{trajectory}-{len(context.token_ids)}"
                handle = await client.export_kv(name, context.token_ids.tolist())
            except (KvTransferFailed, EngineRefused, EngineUnreachable) as error:
                return {"cause": f"export failed: {error}"}
            answer["handle"] = handle.to_mapping()
        return answer

    async def move(
        self, session: str, trajectory: str, source: str, source_engine_id: str, engine_id: str, kind: str
    ) -> None:
        """Bring the context here and report."""
        began_s = time.perf_counter()
        tokens, cause = await self._move(session, trajectory, source, engine_id, kind)
        self._tell(
            {
                "op": "heddle-move-ended",
                "session": session,
                "trajectory": trajectory,
                "engine_id": engine_id,
                "source_engine_id": source_engine_id,
                "ok": not cause,
                "kind": kind,
                "seconds": time.perf_counter() - began_s,
                "tokens": tokens,
                "cause": cause,
            }
        )

    async def _move(
        self, session: str, trajectory: str, source: str, engine_id: str, kind: str
    ) -> tuple[int, str]:
        """Tokens brought, and why it failed."""
        client, worker = self._lodging.client, self._lodging.worker
        if client is None or worker is None or engine_id != self._lodging.engine_id:
            return 0, "the target engine is gone"
        try:
            answer = await worker.rpc(source).heddle_export(
                session=session, trajectory=trajectory, transfer=kind == "transfer"
            )
        except (OSError, AttributeError) as error:
            return 0, f"the source worker is gone: {error}"
        if not answer or "ids" not in answer:
            return 0, (answer or {}).get("cause", "the source worker has no such handler")
        context = CachedContext(EMPTY, 0).extended(bytes(answer["ids"]))
        ids = context.token_ids.tolist()
        name = f"import-{session}-{trajectory}-{len(ids)}"
        try:
            if kind == "transfer":
                await client.import_kv(name, ids, KvHandle.from_mapping(answer["handle"]))
            else:
                await client.warm(ids, name)
        except (KvTransferFailed, EngineRefused, EngineUnreachable) as error:
            return 0, str(error)
        self._contexts.put(session, trajectory, context)
        return len(ids), ""
