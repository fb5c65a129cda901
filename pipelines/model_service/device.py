"""Memory slots: where the weights of a loaded model are, and from where they are gone after an eviction."""

from __future__ import annotations

import fcntl
import mmap
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pipelines.model_service.host_copy import StoredTensor, aligned


class DoesNotFit(Exception):
    """The model is larger than its places; one line."""


class OccupiedPlaces:
    """The places of one loaded model; a place that another process occupies is refused.

    Parameters
    ----------
    places
        Mappings with ``path``, ``offset`` and ``length``.
    """

    def __init__(self, places: Iterable[Mapping[str, Any]]) -> None:
        self._files: list[Any] = []
        self._memory: list[mmap.mmap] = []
        self._lengths = [int(place["length"]) for place in places]
        try:
            for place in places:
                file = open(place["path"], "r+b")  # noqa: SIM115
                self._files.append(file)
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, place["length"], place["offset"])
                self._memory.append(mmap.mmap(file.fileno(), place["length"], offset=place["offset"]))
        except BlockingIOError:
            self.free()
            raise DoesNotFit(f"{place['path']} is occupied by another model") from None
        except BaseException:
            self.free()
            raise

    def arrange(self, tensors: Iterable[StoredTensor]) -> dict[str, tuple[int, int]]:
        """Place and offset of each tensor; a model on several devices is spread over them evenly."""
        ordered = sorted(tensors, key=lambda tensor: -tensor.length)
        used = [0] * len(self._lengths)
        found = {}
        for tensor in ordered:
            place = min(range(len(used)), key=lambda number: used[number])
            found[tensor.name] = (place, used[place])
            used[place] += aligned(tensor.length)
        over = [number for number, size in enumerate(used) if size > self._lengths[number]]
        if over:
            whole = sum(tensor.length for tensor in ordered)
            have = " + ".join(f"{length / 2**20:.1f}" for length in self._lengths)
            raise DoesNotFit(f"its weights of {whole / 2**20:.1f} MiB do not fit into {have} MiB of device memory")
        return found

    def put(self, tensor: StoredTensor, data: memoryview, place: int, offset: int) -> torch.Tensor:
        memory = self._memory[place]
        memory[offset : offset + tensor.length] = data
        count = tensor.length // torch.empty(0, dtype=getattr(torch, tensor.dtype)).element_size()
        if not count:
            return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        flat = torch.frombuffer(memory, dtype=getattr(torch, tensor.dtype), count=count, offset=offset)
        return flat.view(tensor.shape)

    def free(self) -> None:
        """Give the pages back. No tensor may be over them any more."""
        for memory in self._memory:
            memory.madvise(mmap.MADV_REMOVE)
            memory.close()
        self._memory = []
        for file in self._files:
            file.close()  # its locks go with it
        self._files = []
