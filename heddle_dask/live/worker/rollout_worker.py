"""The rollout worker: a Dask worker that hosts one engine and runs LLM steps on it.

The plugin takes effect on workers that carry the resource ``ENGINE``. It starts the engine in the background,
publishes ``LLM = slots`` when the engine answers, and withdraws it when the engine is gone; a step that finds
no engine ends as data (``"engine-lost"``) and is asked for again by the driver.

A plugin that waits for orders starts nothing by itself: the scheduler says which engine this worker hosts, if any, and
may say another one between rollouts (`live.seating`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Worker, get_worker
from distributed.diagnostics.plugin import WorkerPlugin

from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.engines.contract import (
    EngineInfo,
    EngineRefused,
    EngineUnreachable,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
)
from heddle_dask.engines.kinds import engine_kind
from heddle_dask.engines.priority import engine_priority
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.messages import (
    ENGINE_RESOURCE,
    SLOT_RESOURCE,
    STEP_RESULTS,
    STREAM_INTERVAL_S,
    StepCall,
    StepResult,
    step_end,
)
from heddle_dask.live.wire.result_push import Outbox
from heddle_dask.live.worker.context_cache import EMPTY, CachedContext, ContextCache
from heddle_dask.live.worker.context_mover import ContextMover
from heddle_dask.live.worker.engine_host import EngineHost, Watch

PLUGIN_NAME = "heddle-rollout-worker"
# That a step holds a slot is told this much later: the request to the engine goes first.
TELL_STARTED_AFTER_S = 0.005


def visible_gpus(spec: EngineSpec, environ: Mapping[str, str]) -> Sequence[str]:
    """The GPUs that this process sees, by name; none where it does not say, or where the engine uses none."""
    if not engine_kind(spec.kind).uses_gpus():
        return []
    return [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]


async def run_step(call: StepCall) -> StepResult:
    """The Dask task of one LLM step. Runs on the worker's event loop and takes no thread."""
    worker = get_worker()
    plugin = worker.plugins.get(PLUGIN_NAME)
    if not isinstance(plugin, RolloutWorker):
        return StepResult(status="engine-lost", message="this worker hosts no engine")
    return await plugin.run_step(call)


class RolloutWorker(WorkerPlugin):
    """Hosts an engine on every worker tagged ``ENGINE``.

    Register with ``client.register_plugin(RolloutWorker(spec))`` or by ``--preload workers.rollout_worker``.

    Parameters
    ----------
    waits
        True: no engine is started before the scheduler orders one; `spec` then says of which kind they will be.
    """

    name = PLUGIN_NAME

    def __init__(self, spec: EngineSpec, watch: Watch | None = None, *, waits: bool = False) -> None:
        self.spec = spec
        self.watch = watch
        self.waits = waits
        self.worker: Worker | None = None
        self._reports: dict[Any, dict[str, Any]] = {}
        self._client: EngineClient | None = None

    async def setup(self, worker: Worker) -> None:
        """Start the engine in the background: a worker must not seem dead while weights load."""
        if ENGINE_RESOURCE not in worker.state.total_resources:
            return
        self.worker = worker
        collect_seldom()
        self.engine_id = ""
        self._incarnations = 0
        self._host: EngineHost | None = None
        self._hosts = 0
        self._torn_down = False
        self._changing = asyncio.Lock()
        self._contexts = ContextCache()
        self._outbox = Outbox()
        self._mover = ContextMover(self, self._contexts, self._tell)
        self._running: dict[Any, str] = {}
        self._aborted: set[Any] = set()
        dask.add_worker_handlers(
            worker,
            rpc={
                "heddle_context": self.serve_context,
                "heddle_export": self._mover.export,
                "heddle_seat": self.take_seat,
                STEP_RESULTS: self._outbox.take,
            },
            stream={
                "heddle-abort": self.on_abort,
                "heddle-forget": self.on_forget,
                "heddle-move": self.on_move,
            },
        )
        dask.shorten_own_interval(worker, STREAM_INTERVAL_S)
        if self.waits:
            self._tell(self._introduction())
        else:
            self._start_engine(self.spec)

    async def teardown(self, worker: Worker) -> None:
        """Stop the engine."""
        if self.worker is not None:
            self._torn_down = True
            async with self._changing:
                if self._host is not None:
                    await self._host.stop()
                    self._host = None
            if self.engine_id:
                self._on_lost("it was stopped")
            await worker.set_resources(**{SLOT_RESOURCE: 0})

    @property
    def client(self) -> EngineClient | None:
        """The client of the engine that answers now, if any."""
        return self._client

    # -- the engine's life -------------------------------------------------------------------------

    def _introduction(self) -> dict[str, Any]:
        """What the scheduler must know to order an engine here."""
        assert self.worker is not None
        return {
            "op": "heddle-seat",
            "name": str(self.worker.name),
            "node": socket.gethostname(),
            "units": max(1, int(self.worker.state.total_resources[ENGINE_RESOURCE])),
            "gpus": visible_gpus(self.spec, os.environ),
        }

    def _start_engine(self, spec: EngineSpec) -> None:
        assert self.worker is not None
        self.spec = spec
        self._hosts += 1
        self._host = EngineHost(
            spec,
            Path(self.worker.local_directory) / "heddle" / f"host-{self._hosts}",
            on_ready=self._on_ready,
            on_lost=self._on_lost,
            on_trouble=self._on_trouble,
            records=Path(tempfile.gettempdir()) / f"heddle-engines-{os.getuid()}",
            watch=self.watch,
        )
        self._host.start()

    async def take_seat(self, spec: Mapping[str, Any] | None) -> bool:
        """RPC of the scheduler: end the engine; then start the one that is described, if any."""
        async with self._changing:
            await self._vacate()
            if spec is not None and not self._torn_down:
                self._start_engine(EngineSpec.from_mapping(spec))
        return True

    async def _vacate(self) -> None:
        """End the engine, if there is one. The scheduler, which asked for it, knows that it is gone."""
        if self._host is None:
            return
        assert self.worker is not None
        host, self._host = self._host, None
        self.engine_id, self._client = "", None
        await host.stop()
        await self.worker.set_resources(**{SLOT_RESOURCE: 0})

    def _on_ready(self, client: EngineClient, info: EngineInfo) -> None:
        self._incarnations += 1
        self._client = client
        assert self.worker is not None
        self.engine_id = f"{self.worker.name}/{os.getpid()}-{self._incarnations}"
        self._background(self._announce(info))

    async def _announce(self, info: EngineInfo) -> None:
        """Publish the slots first: a step placed here must find the resource."""
        assert self.worker is not None
        engine_id = self.engine_id
        await self.worker.set_resources(**{SLOT_RESOURCE: self.spec.slots + self.spec.steps_ahead})
        if engine_id == self.engine_id:
            facts = [
                engine_id,
                self.spec.slots,
                info.max_model_len,
                self.spec.tp_degree,
                info.kv_capacity_tokens,
                0,
                self.spec.kv_transfer,
                engine_kind(self.spec.kind).kv_bytes_per_token(self.spec),
            ]
            model = [self.spec.kind, self.spec.model]
            start_s = 0.0 if self._host is None else self._host.start_s
            self._tell({"op": "heddle-engine-ready", "engine": facts, "model": model, "start_s": start_s})

    def _on_lost(self, reason: str) -> None:
        # The slots stay published: steps that are queued here must start, find no engine and end as data.
        self._tell({"op": "heddle-engine-lost", "engine_id": self.engine_id, "reason": reason})
        self.engine_id = ""
        self._client = None

    def _on_trouble(self, message: str) -> None:
        self._tell({"op": "heddle-engine-trouble", "message": message})

    def _tell(self, message: dict[str, Any]) -> None:
        assert self.worker is not None
        dask.send_from_worker(self.worker, message)

    def _background(self, coroutine: Any) -> None:
        assert self.worker is not None
        self.worker.loop.add_callback(lambda: asyncio.ensure_future(coroutine))

    # -- steps -------------------------------------------------------------------------------------

    async def run_step(self, call: StepCall) -> StepResult:
        """Generate one step; every way it can end is a `StepResult`."""
        started_s = time.perf_counter()
        assert self.worker is not None
        placed = dask.task_annotation(self.worker, call.key)
        engine_id, client = self.engine_id, self._client
        there = placed.get("engine", engine_id)
        if client is None or engine_id != placed.get("engine"):
            return self._failed(call, there, "engine-lost", "the engine is gone")
        context = await self._context(call, placed.get("source"))
        if context is None:
            return self._failed(call, there, "context-missing", "")
        self.worker.loop.call_later(TELL_STARTED_AFTER_S, self._tell_started, call, there)
        try:
            result = await self._generate(client, call, context, float(placed.get("priority", 0.0)))
        except EngineUnreachable as error:
            return self._failed(call, there, "engine-lost", str(error))
        except EngineRefused as error:
            return self._failed(call, there, "refused", str(error))
        answer = self._answer(call, context, result, engine_id, time.perf_counter() - started_s)
        _, facts = step_end(call, answer)
        return self._end(call, facts, answer)

    def _end(self, call: StepCall, facts: Mapping[str, Any], answer: StepResult) -> StepResult:
        self._reports[call.key] = {
            "op": "heddle-step-ended",
            "session": call.session,
            "step_id": list(call.step_id),
            **facts,
        }
        # What the controller must act on first, a failure, reaches the driver by way of the scheduler.
        if answer.status in ("ok", "aborted"):
            self._outbox.put(call.session, call.key, answer)
        return answer

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Report a step that has ended in the same message as Dask's own report, and before it."""
        report = self._reports.pop(key, None)
        if report is not None:
            self._tell(report)

    def _tell_started(self, call: StepCall, engine_id: str) -> None:
        if call.key in self._running:
            step_id = list(call.step_id)
            self._tell(
                {
                    "op": "heddle-step-started",
                    "session": call.session,
                    "step_id": step_id,
                    "engine_id": engine_id,
                }
            )

    async def _generate(
        self, client: EngineClient, call: StepCall, context: CachedContext, priority: float
    ) -> GenerateResult:
        name, step_index, attempt = call.step_id
        request = GenerateRequest(
            request_id=f"{call.session}-{name}-{step_index}.{attempt}",
            token_ids=context.token_ids.tolist(),
            sampling=SamplingParams(
                max_tokens=call.max_tokens,
                temperature=call.temperature,
                top_p=call.top_p,
                seed=call.seed,
                ignore_eos=call.ignore_eos,
                stop_token_ids=call.stop_token_ids,
            ),
            priority=engine_priority(priority),
        )
        self._running[call.key] = request.request_id
        try:
            return await client.generate(request)
        finally:
            del self._running[call.key]

    def _answer(
        self, call: StepCall, context: CachedContext, result: GenerateResult, engine_id: str, run_s: float
    ) -> StepResult:
        assert self.worker is not None
        ids = np.asarray(result.token_ids, dtype="<i4").tobytes()
        self._contexts.put(call.session, call.step_id.trajectory_id, context.extended(ids))
        return StepResult(
            status="aborted" if result.finish_reason == "abort" else "ok",
            engine_id=engine_id,
            token_ids=ids,
            logprobs=np.asarray(result.logprobs, dtype="<f4").tobytes(),
            finish_reason=result.finish_reason,
            cached_tokens=result.cached_tokens,
            policy_version=result.policy_version,
            version_spans=tuple((s.policy_version, s.start, s.stop) for s in result.version_spans),
            queue_s=result.queue_s,
            prefill_s=result.prefill_s,
            decode_s=result.decode_s,
            run_s=run_s,
            engine_s=result.queue_s + result.prefill_s + result.decode_s,
            address=self.worker.address,
        )

    def _failed(self, call: StepCall, engine_id: str, status: Any, message: str) -> StepResult:
        assert self.worker is not None
        answer = StepResult(status=status, engine_id=engine_id, message=message, address=self.worker.address)
        return self._end(call, {"engine_id": engine_id, "cause": status}, answer)

    # -- contexts ----------------------------------------------------------------------------------

    async def _context(self, call: StepCall, source: str | None) -> CachedContext | None:
        """The whole context: delta alone, base held here, or base fetched from the worker before."""
        if call.base_tokens == 0:
            return CachedContext(EMPTY, 0).extended(call.delta)
        base = self._contexts.get(call.session, call.step_id.trajectory_id)
        if base is None or not base.is_base(call.base_tokens, call.base_crc):
            base = await self._fetch(call, source)
        return None if base is None else base.extended(call.delta)

    async def _fetch(self, call: StepCall, source: str | None) -> CachedContext | None:
        assert self.worker is not None
        if source is None or source == self.worker.address:
            return None
        try:
            data = await self.worker.rpc(source).heddle_context(
                session=call.session, trajectory=call.step_id.trajectory_id
            )
        except (OSError, AttributeError):
            return None  # that worker has left; the driver sends the whole context
        if not data:
            return None
        base = CachedContext(EMPTY, 0).extended(bytes(data))
        return base if base.is_base(call.base_tokens, call.base_crc) else None

    async def serve_context(self, session: str, trajectory: str) -> bytes:
        """RPC of other rollout workers: the ids held for a trajectory that moves there."""
        context = self._contexts.get(session, trajectory)
        self._contexts.drop(session, trajectory)
        return b"" if context is None else context.token_ids.tobytes()

    def on_abort(self, key: list[Any]) -> None:
        """Stop the running request of a step; its call returns with the tokens so far.

        In the background: Dask handles no other message of the scheduler before this one is done, and closes the
        worker when it raises.
        """
        request_id = self._running.get(tuple(key))
        if request_id is not None and self._client is not None:
            self._background(self._abort(self._client, request_id))

    async def _abort(self, client: EngineClient, request_id: str) -> None:
        # An engine that is gone has aborted it; its steps report that by themselves.
        with contextlib.suppress(EngineUnreachable):
            await client.abort([request_id])

    def on_move(self, **move: Any) -> None:
        """Bring a trajectory's context here, in the background as `on_abort` does."""
        self._background(self._mover.move(**move))

    def on_forget(self, session: str, trajectory: str) -> None:
        """Drop the context of a trajectory, as the controller says."""
        self._contexts.drop(session, trajectory)
