"""Devices of a host without GPUs: files in memory, each as large as the memory of one device.

A copy of a service occupies one place of each device of its chunk. The pages of a place exist only while something is
there: an eviction really frees memory.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from heddle_dask.core.gpu_chunks import GpuChunk
from heddle_dask.engines.health import Tell
from heddle_dask.engines.model_services.served_process import ServedProcess, ServiceClient
from heddle_dask.engines.model_services.spec import Input, Reply, ServiceFailed, ServiceRefused, ServiceSpec


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """Memory for one model on one device: `length` bytes of the file from `offset` on."""

    path: str
    offset: int
    length: int


class MemorySlots:
    """The devices of one host.

    Parameters
    ----------
    directory
        On a file system in memory (``/dev/shm``).
    models
        Places of each device: equal parts of its memory.
    """

    def __init__(self, directory: Path, devices: int, device_bytes: int, models: int = 1) -> None:
        self._directory = directory
        self._place_bytes = device_bytes // models // mmap.PAGESIZE * mmap.PAGESIZE
        self._free = {device: list(range(models)) for device in range(devices)}
        for device in range(devices):
            with open(self._path(device), "wb") as file:
                file.truncate(max(1, self._place_bytes * models))

    def take(self, chunk: GpuChunk) -> tuple[MemoryPlace, ...]:
        devices = range(chunk.first, chunk.end)
        full = [device for device in devices if not self._free.get(device)]
        if full:
            raise ServiceFailed(f"memory slot {full[0]} has no free place: evict a service first")
        numbers = {device: self._free[device].pop(0) for device in devices}
        return tuple(
            MemoryPlace(str(self._path(device)), number * self._place_bytes, self._place_bytes)
            for device, number in numbers.items()
        )

    def give_back(self, places: tuple[MemoryPlace, ...]) -> None:
        for place in places:
            with (
                open(place.path, "r+b") as file,
                mmap.mmap(file.fileno(), place.length, offset=place.offset) as memory,
            ):
                memory.madvise(mmap.MADV_REMOVE)
            device = int(Path(place.path).name.removeprefix("device-"))
            self._free[device].append(place.offset // self._place_bytes)
            self._free[device].sort()

    def used_bytes(self, device: int) -> int:
        return self._path(device).stat().st_blocks * 512

    def close(self) -> None:
        for device in self._free:
            self._path(device).unlink(missing_ok=True)

    def _path(self, device: int) -> Path:
        return self._directory / f"device-{device}"


SERVER_MODULE = "pipelines.model_service"
START_TIMEOUT_S = 300.0
_INSTALLATION = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class CpuServer:
    """See `ModelServer`."""

    client: ServiceClient

    async def score(self, inputs: Sequence[Input]) -> list[float]:
        body = {"inputs": [each if isinstance(each, str) else list(map(int, each)) for each in inputs]}
        return [float(score) for score in (await self.client.ask("POST", "/score", body))["scores"]]

    async def logprobs(self, token_ids: Sequence[int], start: int) -> list[float]:
        body = {"token_ids": list(map(int, token_ids)), "start": start}
        return [float(each) for each in (await self.client.ask("POST", "/logprobs", body))["logprobs"]]

    async def judge(self, messages: Sequence[Mapping[str, str]], max_tokens: int, temperature: float) -> Reply:
        body = {"messages": list(messages), "max_tokens": max_tokens, "temperature": temperature}
        reply: Reply = await self.client.ask("POST", "/judge", body)
        return reply


class CpuBackEnd:
    """See `ModelBackEnd`.

    Parameters
    ----------
    copies
        Directory in memory for the copies in host memory.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        chunk: GpuChunk,
        slots: MemorySlots,
        copies: Path,
        logs: Path,
        tell: Tell = lambda line: None,
    ) -> None:
        self._spec = spec
        self._chunk = chunk
        self._slots = slots
        self._copy = copies / f"{spec.name.replace('/', '_')}-{chunk.gpus}.copy"
        self._places: tuple[MemoryPlace, ...] = ()
        label = f"{spec.name.replace('/', '_')}-{chunk.first}-{chunk.gpus}"
        self._new_process = partial(ServedProcess, label, logs, tell=tell)
        self._process: ServedProcess | None = None

    @property
    def process_id(self) -> int:
        return 0 if self._process is None else self._process.process_id

    async def load(self, *, cold: bool, keep: bool) -> None:
        """Copy the weights into places of the chunk's slots."""
        process = await self._running()
        self._places = self._slots.take(self._chunk)
        body = {
            "places": [asdict(place) for place in self._places],
            "copy": str(self._copy),
            "cold": cold,
            "keep": keep,
        }
        try:
            await process.unless_ended(process.client.ask("POST", "/load", body))
        except ServiceRefused as error:
            self._free()
            raise ServiceFailed(str(error)) from error
        except BaseException:
            await self._end()
            raise

    async def _running(self) -> ServedProcess:
        if self._process is not None and self._process.runs:
            return self._process
        await self._end()
        self._process = process = self._new_process()
        # Not from the working directory: a user's package may also be called `pipelines`.
        argv = [sys.executable, "-P", "-m", SERVER_MODULE, "--socket", process.address.socket]
        argv += ["--model", str(self._spec.model), "--dtype", self._spec.dtype]
        argv += ["--batch", str(self._spec.batch), "--max-tokens", str(self._spec.max_tokens)]
        paths = [str(_INSTALLATION), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": str(self._chunk.gpus),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        try:
            await process.start(argv, env, START_TIMEOUT_S)
        except BaseException:
            await self._end()
            raise
        return process

    async def evict(self) -> None:
        process = self._process
        assert process is not None, "evict what was loaded"
        try:
            await process.unless_ended(process.client.ask("POST", "/evict"))
            self._free()
        except BaseException:
            await self._end()  # its memory must be free, whatever it says
            raise

    async def drop_copy(self) -> None:
        await asyncio.to_thread(self._copy.unlink, missing_ok=True)

    @property
    def server(self) -> CpuServer:
        if self._process is None:
            raise ServiceFailed(f"service {self._spec.name} does not run")
        return CpuServer(self._process.client)

    async def resident_bytes(self) -> int:
        if self._process is None or not self._process.runs:
            return 0
        return int((await self._process.client.ask("GET", "/health"))["resident_bytes"])

    async def ended(self) -> str:
        assert self._process is not None, "load it first"
        return await self._process.ended()

    async def stop(self) -> None:
        await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop()
        self._free()

    def _free(self) -> None:
        places, self._places = self._places, ()
        if places:
            self._slots.give_back(places)
