"""The model services of one host: which copy is on which chunk of its GPUs. Carries out orders, decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from heddle_dask.core.gpu_chunks import GpuChunk
from heddle_dask.engines.address import private_directory
from heddle_dask.engines.health import Tell
from heddle_dask.engines.model_services.cpu_backend import CpuBackEnd, MemorySlots
from heddle_dask.engines.model_services.spec import CPU_BACK_END, ModelBackEnd, ServiceFailed, ServiceSpec
from heddle_dask.engines.model_services.vllm_backend import VllmBackEnd

# A copy whose process lives may fail one request.
_DEATH_TOLD_S = 2.0

Lost = Callable[[str, GpuChunk, str], None]
"""Takes the name, the chunk and the cause of a resident copy that has died."""


SLOT_BYTES = 1 << 30
"""Memory of a slot where nothing else is said."""


@dataclass(frozen=True, slots=True)
class HostDevices:
    """The devices of one host of model services.

    Attributes
    ----------
    gpus
        Number of GPUs; on a host without GPUs, of memory slots.
    models
        Copies that are resident on one GPU at the same time: each has its part of the memory.
    names
        Names of the GPUs (``CUDA_VISIBLE_DEVICES``); empty: 0, 1, 2, ….
    slot_bytes
        Memory of each slot of a host without GPUs.
    copy_bytes
        Host memory for copies of services; None: no limit.
    """

    gpus: int
    models: int = 1
    names: tuple[str, ...] = ()
    slot_bytes: int = SLOT_BYTES
    copy_bytes: int | None = None


@dataclass(slots=True)
class _Copy:
    """One copy of a service, resident or not."""

    backend: ModelBackEnd
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    resident: bool = False
    watch: asyncio.Task[None] | None = None


class ModelHost:
    """Starts, loads and evicts copies of services on the devices of this host.

    Parameters
    ----------
    lost
        Called when the process of a resident copy has died without an order.
    tell
        Called when one is silent for a while.
    """

    def __init__(self, devices: HostDevices, logs: Path, lost: Lost, tell: Tell = lambda line: None) -> None:
        self._devices = devices
        self._logs = logs
        self._lost = lost
        self._tell = tell
        self._copies: dict[tuple[str, GpuChunk], _Copy] = {}
        self._memory: Path | None = None
        self._slots: MemorySlots | None = None

    def use_gpus(self, names: tuple[str, ...]) -> None:
        """The GPUs of this host have these names from now on; none: 0, 1, 2, …."""
        self._devices = replace(self._devices, names=names)

    async def load(self, spec: ServiceSpec, chunk: GpuChunk, *, cold: bool, keep: bool) -> None:
        """Make a copy resident.

        Raises
        ------
        ServiceFailed
            Nothing of it is resident then.
        """
        copy = self._copies.get((spec.name, chunk))
        if copy is None:
            copy = self._copies[spec.name, chunk] = _Copy(self._new_backend(spec, chunk))
        async with copy.turn:
            await copy.backend.load(cold=cold, keep=keep)
            copy.resident = True
            copy.watch = asyncio.create_task(self._watch(spec.name, chunk, copy))

    async def evict(self, service: str, chunk: GpuChunk) -> None:
        """Free the memory of a copy; one that has died is evicted already."""
        copy = self._copies.get((service, chunk))
        if copy is None:
            return
        async with copy.turn:
            await _end_watch(copy)
            if copy.resident:
                copy.resident = False
                # A process that has died, or that is ended because it does not obey, has freed its memory.
                with contextlib.suppress(ServiceFailed):
                    await copy.backend.evict()

    async def drop_copies(self, service: str, gpus: int) -> None:
        """Free the copies in host memory of a service for this number of GPUs."""
        for (name, chunk), copy in list(self._copies.items()):
            if name == service and chunk.gpus == gpus:
                async with copy.turn:
                    await copy.backend.drop_copy()

    def resident(self, service: str, chunk: GpuChunk) -> ModelBackEnd:
        """The resident copy that answers requests."""
        copy = self._copies.get((service, chunk))
        if copy is None or not copy.resident:
            raise ServiceFailed(f"service {service} is not resident on {chunk.gpus} GPUs from {chunk.first} on")
        return copy.backend

    async def after_failure(self, service: str, chunk: GpuChunk) -> None:
        """Wait until the death of this copy has been told, if it has died: a repetition must not find it again."""
        copy = self._copies.get((service, chunk))
        if copy is not None and copy.watch is not None:
            await asyncio.wait((copy.watch,), timeout=_DEATH_TOLD_S)

    async def close(self) -> None:
        """End all processes and free all memory; a load afterwards begins anew."""
        copies, self._copies = list(self._copies.values()), {}
        for copy in copies:
            await _end_watch(copy)
        await asyncio.gather(*(copy.backend.stop() for copy in copies))
        memory, self._memory, self._slots = self._memory, None, None
        if memory is not None:
            await asyncio.to_thread(shutil.rmtree, memory, ignore_errors=True)

    async def _watch(self, service: str, chunk: GpuChunk, copy: _Copy) -> None:
        cause = await copy.backend.ended()
        copy.resident = False
        await copy.backend.stop()
        self._lost(service, chunk, cause)

    def _new_backend(self, spec: ServiceSpec, chunk: GpuChunk) -> ModelBackEnd:
        if spec.backend != CPU_BACK_END:
            return VllmBackEnd(spec, chunk, self._devices.names, self._devices.models, self._logs, self._tell)
        if self._slots is None:
            self._memory = memory_directory()
            self._slots = MemorySlots(self._memory, self._devices.gpus, self._devices.slot_bytes, self._devices.models)
        assert self._memory is not None
        return CpuBackEnd(spec, chunk, self._slots, self._memory, self._logs, self._tell)


async def _end_watch(copy: _Copy) -> None:
    watch, copy.watch = copy.watch, None
    if watch is not None and not watch.done():
        watch.cancel()
        await asyncio.wait((watch,))


def memory_directory() -> Path:
    """A new directory of this process on a file system in memory."""
    return private_directory(sweep_memory() / f"{os.getpid()}-{secrets.token_hex(4)}")


def sweep_memory() -> Path:
    """Remove the directories of dead processes; returns where they are."""
    shared = Path("/dev/shm")
    root = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    parent = private_directory(root / f"heddle-models-{os.getuid()}")
    for left in parent.iterdir():
        owner, _, _ = left.name.partition("-")
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(left, ignore_errors=True)
    return parent
