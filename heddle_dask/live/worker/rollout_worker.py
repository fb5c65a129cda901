"""The rollout worker: a Dask worker that hosts one engine and runs LLM steps on it.

The plugin takes effect on workers that carry the resource ``ENGINE``. It starts the engine in the background,
publishes ``LLM = slots`` when the engine answers, and withdraws it when the worker ends the engine; a step that finds
no engine ends as data (``"engine-lost"``), and the driver asks for it again.

An engine that uses GPUs starts when the scheduler has said which ones: engines of one node take different ones
(`live.scheduler.gpu_seats`). `EngineSpec.devices` names them instead.

A plugin that waits for orders starts no engine by itself: the scheduler decides which engine this worker hosts, if any,
and may replace it between rollouts (`live.scheduler.deployment`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from distributed import Worker, get_worker
from distributed.comm import get_address_host
from distributed.diagnostics.plugin import WorkerPlugin

from heddle_dask.core.commands import AbortStep, DropContext, FetchWeights, InstallWeights
from heddle_dask.core.events import EngineLost, StepFailed, StepFinished, StepStarted
from heddle_dask.core.ids import EngineId
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.engines.contract import (
    EngineInfo,
    EngineRefused,
    EngineUnreachable,
    GenerateRequest,
    GenerateResult,
    engine_priority,
)
from heddle_dask.engines.gpus import usable_gpus
from heddle_dask.engines.spec import EngineSpec, engine_kind
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.envelopes import UNSTAMPED, Report
from heddle_dask.live.wire.messages import (
    ENGINE_LOGS_VARIABLE,
    ENGINE_PLUGIN,
    ENGINE_RESOURCE,
    SLOT_RESOURCE,
    STREAM_INTERVAL_S,
    WEIGHTS_VARIABLE,
    Key,
    StepCall,
    StepPlacement,
    StepResult,
    StepStatus,
    step_key,
)
from heddle_dask.live.wire.results import ResultReport, packed_result
from heddle_dask.live.wire.transport import Done, Handlers, guarded, tells_faults
from heddle_dask.live.wire.worker_messages import (
    EngineReadyReport,
    EngineStartFailedReport,
    EngineStartingReport,
    EngineWorkerReport,
    ExportContext,
    GpusReturnedReport,
    HostEngine,
    MoveContextOrder,
    SilenceReport,
    TakeContext,
)
from heddle_dask.live.worker.allocator import keep_buffers
from heddle_dask.live.worker.announcements import Announcements
from heddle_dask.live.worker.background_tasks import BackgroundTasks
from heddle_dask.live.worker.called_off_steps import NOT_BEGUN, CalledOffSteps
from heddle_dask.live.worker.context_cache import CachedContext, ContextCache
from heddle_dask.live.worker.context_mover import ContextMover
from heddle_dask.live.worker.engine_description import described_engine
from heddle_dask.live.worker.engine_host import EXIT_NOTICED_S, EngineHost, Watch, visible_gpus
from heddle_dask.live.worker.own_gpus import node_name
from heddle_dask.live.worker.rejoin import comes_back
from heddle_dask.live.worker.reply_reading import read_by_engine
from heddle_dask.live.worker.step_text import TextSender
from heddle_dask.live.worker.weight_keeper import WeightKeeper

PLUGIN_NAME = ENGINE_PLUGIN
# Steps that have started are reported together, this long after the first: their requests to the engine go first.
REPORT_STARTS_AFTER_S = 0.02
# A step waits so long for word that its engine, which does not answer, is lost.
LOSS_NOTICED_S = 2 * EXIT_NOTICED_S
# Of this process, whatever plugin counts: a driver may replace the one of a preload, and an engine id names one start.
_INCARNATIONS = itertools.count(1)


def engine_seed(seed: int, worker: object, number: int) -> int:
    """The seed of an engine, the `number`-th of a worker: different for each."""
    return crc32(f"{seed}/{worker}/{number}".encode()) % 2**31


def can_stop_after_prompt(call: StepCall) -> bool:
    """Whether the step may stop after its first token and go on elsewhere: an engine applies a form from the start."""
    return call.sampling.max_tokens > 1 and call.sampling.structured is None


async def run_step(call: StepCall) -> StepResult:
    """The Dask task of one LLM step. Runs on the worker's event loop and takes no thread."""
    worker = get_worker()
    plugin = worker.plugins.get(PLUGIN_NAME)
    if not isinstance(plugin, RolloutWorker):
        return StepResult(status="engine-lost", message="this worker hosts no engine")
    return await plugin.run_step(call)


class RolloutWorker(WorkerPlugin):
    """Hosts an engine on every worker tagged ``ENGINE``.

    Register with ``client.register_plugin(RolloutWorker(spec))`` or by the preload.

    Parameters
    ----------
    waits
        True: no engine is started before the scheduler orders one; `spec` then names the kind of those engines.
    """

    name = PLUGIN_NAME

    def __init__(self, spec: EngineSpec, watch: Watch | None = None, *, waits: bool = False) -> None:
        self.spec = spec
        self.watch = watch
        self.waits = waits
        self.worker: Worker | None = None
        self._reports: dict[Key, ResultReport] = {}
        self._client: EngineClient | None = None
        self._gone = asyncio.Event()  # the engine of `_client` is lost

    async def setup(self, worker: Worker) -> None:
        """Start the engine in the background: a worker must not seem dead while weights load."""
        if ENGINE_RESOURCE not in worker.state.total_resources:
            return
        self.worker = worker
        comes_back(worker)
        collect_seldom()
        keep_buffers()
        self._threads = dask.bound_threads(worker, os.cpu_count() or 1)
        self.engine_id = ""
        self._host: EngineHost | None = None
        self._hosts = 0
        self._torn_down = False
        self._changing = asyncio.Lock()
        self._announcements = Announcements(worker)
        self._send = self._announcements.send
        self._contexts = ContextCache()
        self._texts = TextSender(worker)
        weights = os.environ.get(WEIGHTS_VARIABLE) or Path(worker.local_directory).parent / "heddle-weights"
        # Not within: copies of models make room there for each other.
        published = Path(f"{weights}-published")
        self._mover = ContextMover(self, self._contexts, self._send)
        self._running: dict[Key, str] = {}
        self._started: list[tuple[StepCall, EngineId]] = []  # not reported yet
        self._called_off = CalledOffSteps(worker)
        self._fault = tells_faults(worker)
        self._background = BackgroundTasks(worker.loop, self._fault)
        self._weights = WeightKeeper(self, published, self._send, self._background)
        handlers = Handlers(self._fault)
        handlers.answer(TakeContext, self._mover.take)
        handlers.answer(ExportContext, self._mover.export)
        handlers.answer(HostEngine, self.host_engine)
        handlers.take(MoveContextOrder, self.move_context)
        handlers.take_order(AbortStep, self.abort_step)
        handlers.take_order(DropContext, self.drop_context)
        handlers.take_order(FetchWeights, lambda _, command: self._weights.fetch(command))
        handlers.take_order(InstallWeights, lambda _, command: self._weights.install(command))
        handlers.add_to(worker)
        dask.shorten_own_interval(worker, STREAM_INTERVAL_S)
        dask.call_every(worker, dask.NAMES_S, dask.forget_task_names)
        await self._announcements.begin()
        if self.waits:
            self._send(self._description(visible_gpus(self.spec, os.environ)))
        elif engine_kind(self.spec.kind).uses_gpus() and not self.spec.devices:
            gpus = await asyncio.to_thread(usable_gpus, os.environ)
            self._send(self._description(gpus, wants=self.spec.to_mapping()))
        else:
            self._start_engine(self.spec)

    async def teardown(self, worker: Worker) -> None:
        if self.worker is not None:
            self._torn_down = True
            self._texts.close()
            self._weights.close()
            dask.restore_threads(worker, self._threads)
            async with self._changing:
                if self._host is not None:
                    await self._host.stop()
                    self._host = None
            await self._weights.clear()
            if self.engine_id:
                self._on_lost("it was stopped")
            self._send(GpusReturnedReport())
            self._announcements.close()
            await dask.publish_resource(worker, SLOT_RESOURCE, 0)

    @property
    def client(self) -> EngineClient | None:
        return self._client

    @property
    def host(self) -> EngineHost | None:
        return self._host

    # -- the engine's life -------------------------------------------------------------------------

    def _description(self, gpus: Sequence[str], wants: Mapping[str, Any] | None = None) -> EngineWorkerReport:
        assert self.worker is not None
        return EngineWorkerReport(
            name=str(self.worker.name),
            node=node_name(),
            units=max(1, int(self.worker.state.total_resources[ENGINE_RESOURCE])),
            gpus=tuple(gpus),
            wants=wants,
        )

    def _start_engine(self, spec: EngineSpec) -> None:
        assert self.worker is not None
        self._hosts += 1
        logs = os.environ.get(ENGINE_LOGS_VARIABLE) or Path(self.worker.local_directory) / "heddle"
        # Engines of other machines fetch KV from this one as workers do contexts: at the worker's address.
        host = get_address_host(self.worker.address)
        seed = engine_seed(spec.seed, self.worker.name, self._hosts)
        self.spec = spec = replace(spec, kv_host=host, seed=seed)
        self._host = EngineHost(
            spec,
            Path(logs) / f"host-{self._hosts}",
            on_ready=self._on_ready,
            on_lost=self._on_lost,
            on_start_failed=lambda reason: self._send(EngineStartFailedReport(reason)),
            on_phase=lambda phase: self._send(EngineStartingReport(phase)),
            on_silence=lambda line: self._send(SilenceReport(line)),
            name=lambda: f"engine {self.engine_id}",
            watch=self.watch,
            weights=Path(weights) if (weights := os.environ.get(WEIGHTS_VARIABLE)) else None,
        )
        self._host.installed = self._weights.installed_for(spec)
        self._host.start()

    async def host_engine(self, request: HostEngine) -> Done:
        """End the engine; then start the one that the scheduler asks for, if any."""
        async with self._changing:
            await self._end_engine()
            if request.spec is not None and not self._torn_down:
                self._start_engine(EngineSpec.from_mapping(request.spec))
        return Done()

    async def _end_engine(self) -> None:
        """End the engine, if there is one. No report: the scheduler asked for it."""
        if self._host is None:
            return
        assert self.worker is not None
        host, self._host = self._host, None
        self.engine_id, self._client = "", None
        self._gone.set()
        await host.stop()
        await dask.publish_resource(self.worker, SLOT_RESOURCE, 0)

    def _on_ready(self, client: EngineClient, info: EngineInfo) -> None:
        self._client, self._gone = client, asyncio.Event()
        assert self.worker is not None
        self.engine_id = f"{self.worker.name}/{os.getpid()}-{next(_INCARNATIONS)}"
        self._background.start(self._announce(info))

    async def _announce(self, info: EngineInfo) -> None:
        """Publish the slots first: a step placed here must find the resource."""
        assert self.worker is not None
        engine_id = self.engine_id
        await dask.publish_resource(self.worker, SLOT_RESOURCE, info.slots + self.spec.steps_ahead)
        made = await asyncio.to_thread(described_engine, engine_id, self.spec, info)
        if engine_id == self.engine_id and self._client is not None:
            version = self._client.version
            engine = replace(made, policy_version=version.number, lineage=version.lineage)
            start_s = 0.0 if self._host is None else self._host.start_s
            logprobs = self.spec.options.logprobs
            self._send(EngineReadyReport(engine, self.spec.kind, self.spec.model, start_s, logprobs))

    def _on_lost(self, reason: str) -> None:
        # The slots stay published: steps that are queued here must start, find no engine and end as data.
        self._send(Report("", EngineLost(UNSTAMPED, EngineId(self.engine_id), reason, stranded=False)))
        self.engine_id = ""
        self._client = None
        self._gone.set()

    # -- steps -------------------------------------------------------------------------------------

    async def run_step(self, call: StepCall) -> StepResult:
        """Generate one step; every way it can end is a `StepResult`."""
        started_s = time.perf_counter()
        assert self.worker is not None
        placement = StepPlacement.from_wire(dask.task_annotation(self.worker, call.key))
        engine_id, client, gone = placement.engine_id, self._client, self._gone
        if client is None or engine_id != self.engine_id:
            return self._failed(call, engine_id, "engine-lost", "the engine is gone")
        context = await self._mover.context_for(call, placement.source)
        if context is None:
            return self._failed(call, engine_id, "context-missing", "")
        if call.key in self._called_off:
            return self._ended(call, self._answer(call, context, NOT_BEGUN, engine_id, 0.0))
        if not self._started:
            self.worker.loop.call_later(REPORT_STARTS_AFTER_S, self._report_started)
        self._started.append((call, engine_id))
        try:
            only = placement.prefill_only and can_stop_after_prompt(call)
            asked = replace(call, sampling=replace(call.sampling, max_tokens=1)) if only else call
            result = await self._generate(client, asked, context, placement.priority)
            if only and result.finish_reason == "length":  # it goes on elsewhere, as a preempted step does
                result = replace(result, finish_reason="abort")
            read = await read_by_engine(client, call, context, result)
        except EngineUnreachable as error:
            # The scheduler hears of the engine's loss first: a step that is asked again before that would come back.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gone.wait(), LOSS_NOTICED_S)
            return self._failed(call, engine_id, "engine-lost", str(error))
        except EngineRefused as error:
            return self._failed(call, engine_id, "refused", str(error))
        run_s = time.perf_counter() - started_s
        return self._ended(call, replace(self._answer(call, context, result, engine_id, run_s), read=read))

    def _ended(self, call: StepCall, answer: StepResult) -> StepResult:
        """The answer, which is reported when the task has ended."""
        made = answer.generated
        event = StepFinished(
            UNSTAMPED,
            step_id=call.step_id,
            engine_id=EngineId(answer.engine_id),
            new_tokens=len(made.token_ids),
            cached_tokens=made.cached_tokens,
            finish_reason=made.finish_reason,
            policy_version=made.policy_version,
        )
        self._reports[call.key] = ResultReport(call.session, call.key, event, packed_result(answer))
        return answer

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Report a step that has ended in the same message as Dask's own report, and before it.

        One that nobody wants any more, since its driver has gone, is stopped.
        """
        if self.worker is None:
            return
        if finish == "released" and key in self._running and self._client is not None:
            self._background.start(self._abort(self._client, self._running[key]), key[1])
        report = self._reports.pop(key, None)
        if report is None and key not in self._called_off:
            return
        with guarded("the report of a step", report.session if report is not None else "", self._fault):
            self._called_off.transition(key, finish)
            if report is not None:
                self._send(report)

    def _report_started(self) -> None:
        started, self._started = self._started, []
        for call, engine_id in started:
            if call.key in self._running:
                self._send(Report(call.session, StepStarted(UNSTAMPED, call.step_id, engine_id)))

    async def _generate(
        self, client: EngineClient, call: StepCall, context: CachedContext, priority: float
    ) -> GenerateResult:
        name, step_index, attempt = call.step_id
        request = GenerateRequest(
            request_id=f"{call.session}-{name}-{step_index}.{attempt}",
            token_ids=context.token_ids.tolist(),
            sampling=call.sampling,
            priority=engine_priority(priority),
            streams=call.text_to is not None,
        )
        self._running[call.key] = request.request_id
        try:
            return await client.generate(request, await self._texts.taker(self.spec.model, call, request.token_ids))
        finally:
            del self._running[call.key]

    def _answer(
        self,
        call: StepCall,
        context: CachedContext,
        result: GenerateResult,
        engine_id: EngineId,
        run_s: float,
    ) -> StepResult:
        generated = result.packed()
        ids = np.asarray(generated.token_ids, dtype="<i4").tobytes()
        self._contexts.put(call.session, call.step_id.trajectory_id, context.extended(ids))
        return StepResult(
            status="aborted" if result.finish_reason == "abort" else "ok",
            engine_id=engine_id,
            generated=generated,
            run_s=run_s,
            engine_s=result.queue_s + result.prefill_s + result.decode_s,
        )

    def _failed(self, call: StepCall, engine_id: EngineId, status: StepStatus, message: str) -> StepResult:
        result = StepResult(status=status, engine_id=engine_id, message=message)
        failed = StepFailed(UNSTAMPED, call.step_id, engine_id, status)
        self._reports[call.key] = ResultReport(call.session, call.key, failed, packed_result(result))
        return result

    # -- orders of the scheduler -------------------------------------------------------------------

    def abort_step(self, session: str, command: AbortStep) -> None:
        """Stop a step; its call returns with the tokens so far, none if it waits here for a slot.

        In the background: Dask handles no other message of the scheduler before this one is done.
        """
        key = step_key(session, command.step_id)
        request_id = self._running.get(key)
        if request_id is not None and self._client is not None:
            self._background.start(self._abort(self._client, request_id), session)
        elif request_id is None:
            self._called_off.call_off(key)

    async def _abort(self, client: EngineClient, request_id: str) -> None:
        # An engine that is gone has aborted it; its steps report that by themselves.
        with contextlib.suppress(EngineUnreachable):
            await client.abort([request_id])

    def move_context(self, sender: str, order: MoveContextOrder) -> None:
        """Bring a trajectory's context here, in the background as `abort_step` does."""
        self._background.start(self._mover.move(order), order.session)

    def drop_context(self, session: str, command: DropContext) -> None:
        self._contexts.drop(session, command.trajectory_id)
