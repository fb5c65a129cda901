"""The worker of model services: a Dask worker whose GPUs the scheduler gives to one service after the other.

The plugin takes effect on workers that carry the resource ``MODEL`` (one unit per GPU; on a machine without GPUs, per
memory slot of ``MODEL_SLOT_BYTES`` bytes). The controller orders which service is resident on which GPUs, and starts an
action when the service that it calls is resident.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from distributed import Worker

from heddle_dask.core.commands import DropServiceCopy, EvictService
from heddle_dask.core.errors import BadInput
from heddle_dask.core.events import ServiceEvicted, ServiceLoaded, ServiceLost
from heddle_dask.core.gpu_chunks import GpuChunk
from heddle_dask.core.resources import COPY_BYTES, GPU_POOL, GPUS, MODELS_PER_GPU, Resources
from heddle_dask.engines.model_services.host import SLOT_BYTES, HostDevices, ModelHost, sweep_memory
from heddle_dask.engines.model_services.spec import CPU_BACK_END, ServiceFailed, ServiceSpec
from heddle_dask.live.wire.envelopes import UNSTAMPED, Report, Reported
from heddle_dask.live.wire.messages import (
    COPY_BYTES_RESOURCE,
    ENGINE_LOGS_VARIABLE,
    MODEL_RESOURCE,
    MODELS_PER_GPU_RESOURCE,
    SLOT_BYTES_RESOURCE,
    ActionCall,
    ActionPlacement,
)
from heddle_dask.live.wire.transport import Handlers, send
from heddle_dask.live.wire.worker_messages import ClearServicesOrder, LoadServiceOrder, SilenceReport
from heddle_dask.live.worker.background_tasks import BackgroundTasks
from heddle_dask.live.worker.cpu_pool import CoreLease
from heddle_dask.live.worker.own_gpus import OwnGpus
from heddle_dask.live.worker.service_requests import ServiceHandle
from heddle_dask.live.worker.tool_processes import ToolRaised
from heddle_dask.live.worker.tool_worker import ToolWorker

PLUGIN_NAME = "heddle-service-worker"


class ServiceWorker(ToolWorker):
    """Hosts model services on every worker tagged ``MODEL``."""

    name = PLUGIN_NAME

    async def setup(self, worker: Worker) -> None:
        """Announce the host; no service is started before one is needed."""
        await super().setup(worker)
        if self.worker is None:
            return
        logs = os.environ.get(ENGINE_LOGS_VARIABLE) or worker.local_directory
        await asyncio.to_thread(sweep_memory)  # a worker that was killed has left its models in memory
        self._host = ModelHost(self._devices(worker.state.total_resources), Path(logs), self._lost, self._tell)
        self._gpus = OwnGpus(worker, "services")
        self._orders = ChunkOrders()
        self._background = BackgroundTasks(worker.loop, self._fault)
        self._session = ""

    async def teardown(self, worker: Worker) -> None:
        await super().teardown(worker)
        if self.worker is not None:
            await self._host.close()

    @property
    def pool(self) -> str:
        """Model services name no other."""
        return GPU_POOL

    def resources_of(self, tags: Mapping[str, float]) -> Resources | None:
        """The GPUs of the worker, and what the controller must know of their memory."""
        gpus = int(tags.get(MODEL_RESOURCE, 0))
        if gpus < 1:
            return None
        models, copy_bytes = int(tags.get(MODELS_PER_GPU_RESOURCE, 1)), int(tags.get(COPY_BYTES_RESOURCE, 0))
        return Resources.of({GPUS: gpus, MODELS_PER_GPU: models, COPY_BYTES: copy_bytes})

    @staticmethod
    def _devices(tags: Mapping[str, float]) -> HostDevices:
        return HostDevices(
            gpus=int(tags[MODEL_RESOURCE]),
            models=int(tags.get(MODELS_PER_GPU_RESOURCE, 1)),
            slot_bytes=int(tags.get(SLOT_BYTES_RESOURCE, SLOT_BYTES)),
        )

    def add_handlers(self, handlers: Handlers) -> None:
        handlers.take(LoadServiceOrder, self.load_service)
        handlers.take(ClearServicesOrder, self.clear_services)
        handlers.take_order(EvictService, self.evict_service)
        handlers.take_order(DropServiceCopy, self.drop_copy)

    def offered(self, placement: ActionPlacement) -> dict[str, Any]:
        """The granted copy, for a parameter ``service``; the granted GPUs, for a parameter ``gpus``."""
        offered = {**super().offered(placement), "service": None, "gpus": placement.gpus}
        if placement.service:
            copy = self._host.resident(placement.service, GpuChunk(placement.first_gpu, placement.gpus))
            offered["service"] = ServiceHandle(copy.server, copy.process_id)
        return offered

    async def _run(self, call: ActionCall, placement: ActionPlacement, lease: CoreLease) -> bytes:
        try:
            return await super()._run(call, placement, lease)
        except (ServiceFailed, ToolRaised) as error:
            if placement.service and (isinstance(error, ServiceFailed) or error.cause == "lost"):
                await self._host.after_failure(placement.service, GpuChunk(placement.first_gpu, placement.gpus))
            raise

    def load_service(self, sender: str, order: LoadServiceOrder) -> None:
        """Make a copy resident, beside the handling of messages."""
        self._session = order.session
        chunk = GpuChunk(order.command.first_gpu, order.command.gpus)
        self._order(chunk, lambda: self._load(order, chunk))

    async def _load(self, order: LoadServiceOrder, chunk: GpuChunk) -> None:
        assert self.worker is not None
        command, cause, began_s = order.command, "", time.perf_counter()
        try:
            spec = ServiceSpec.from_mapping(order.spec)
            spec.check_model()
            if spec.backend != CPU_BACK_END:
                self._host.use_gpus(await self._gpus.take(int(self.worker.state.total_resources[MODEL_RESOURCE])))
            await self._host.load(spec, chunk, cold=command.cold, keep=command.keep)
        except (BadInput, ServiceFailed) as error:
            cause = str(error)
        loaded = ServiceLoaded(
            UNSTAMPED,
            self.host_id,
            command.service,
            chunk.first,
            chunk.gpus,
            ok=not cause,
            seconds=time.perf_counter() - began_s,
            cause=cause,
        )
        self._report(order.session, loaded)

    def evict_service(self, session: str, command: EvictService) -> None:
        """Free the memory of a copy, beside the handling of messages."""
        chunk = GpuChunk(command.first_gpu, command.gpus)
        self._order(chunk, lambda: self._evict(session, command.service, chunk))

    async def _evict(self, session: str, service: str, chunk: GpuChunk) -> None:
        await self._host.evict(service, chunk)
        self._report(session, ServiceEvicted(UNSTAMPED, self.host_id, service, chunk.first, chunk.gpus))

    def drop_copy(self, session: str, command: DropServiceCopy) -> None:
        """Free a copy in host memory, after the orders before."""
        self._order(None, lambda: self._host.drop_copies(command.service, command.gpus))

    def clear_services(self, sender: str, order: ClearServicesOrder) -> None:
        """End all services, after the orders before and before those that follow."""
        self._session = ""
        self._order(None, self._end_services)

    async def _end_services(self) -> None:
        await self._host.close()
        self._gpus.give_back()

    def _order(self, chunk: GpuChunk | None, carry_out: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._background.start(self._orders.in_turn(chunk, carry_out), self._session)

    def _lost(self, service: str, chunk: GpuChunk, cause: str) -> None:
        if self._session:
            lost = ServiceLost(UNSTAMPED, self.host_id, service, chunk.first, chunk.gpus, cause)
            self._report(self._session, lost)

    def _tell(self, line: str) -> None:
        assert self.worker is not None
        send(self.worker, SilenceReport(line))

    def _report(self, session: str, event: Reported) -> None:
        assert self.worker is not None
        send(self.worker, Report(session, event))


class ChunkOrders:
    """Orders for one chunk are carried out in the order of their arrival; those for other chunks run beside them."""

    def __init__(self) -> None:
        self._open: list[tuple[GpuChunk | None, asyncio.Event]] = []

    async def in_turn(self, chunk: GpuChunk | None, carry_out: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Carry out an order after all earlier ones for this chunk; None: after all earlier ones."""
        before = [done for other, done in self._open if chunk is None or other is None or other == chunk]
        mine = (chunk, asyncio.Event())
        self._open.append(mine)
        try:
            for done in before:
                await done.wait()
            await carry_out()
        finally:
            mine[1].set()
            self._open.remove(mine)
