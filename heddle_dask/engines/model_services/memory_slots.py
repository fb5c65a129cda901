"""Devices of a host without GPUs: files in memory, each as large as the memory of one device.

A copy of a service occupies one place of each device of its chunk. The pages of a place exist only while something is
there: an eviction really frees memory.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from heddle_dask.core.gpu_chunks import GpuChunk
from heddle_dask.engines.model_services.backend import ServiceFailed


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
    devices
        Number of devices.
    device_bytes
        Memory of each.
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
        """One place on each device of a chunk.

        Raises
        ------
        ServiceFailed
            A device has none left.
        """
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
        """Free the memory of these places, also where the process that used them has died."""
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
        """Memory that a device takes now."""
        return self._path(device).stat().st_blocks * 512

    def close(self) -> None:
        """Remove the devices."""
        for device in self._free:
            self._path(device).unlink(missing_ok=True)

    def _path(self, device: int) -> Path:
        return self._directory / f"device-{device}"
