"""The weights of a model as one file in host memory, from which they are restored without parsing anything.

The file is an index (a line of JSON: name, type, shape, place) and then the tensors, each aligned for any type. It is
written beside its final name, so that a copy that is there is whole.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import torch
from safetensors import safe_open

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a copy: `length` bytes from `offset` on, counted behind the index."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


def aligned(size_bytes: int) -> int:
    """The size rounded up, so that what follows is aligned."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def read_checkpoint(model: Path, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The tensors of a model directory, mapped from its files where their type does not change.

    Parameters
    ----------
    dtype
        Type of the weights; None: as stored.
    """
    tensors = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name)
                tensors[name] = tensor if dtype is None else tensor.to(dtype)
    return tensors


def write_copy(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    rows, offset = [], 0
    for name, tensor in tensors.items():
        length = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append(StoredTensor(name, dtype, tuple(tensor.shape), offset, length))
        offset += aligned(length)
    index = json.dumps([asdict(row) for row in rows]).encode()
    index += b" " * (aligned(len(index) + 1) - len(index) - 1) + b"\n"
    aside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with open(aside, "wb") as file:
        file.write(index)
        for row, tensor in zip(rows, tensors.values(), strict=True):
            file.seek(len(index) + row.offset)
            file.write(bytes_of(tensor))
        file.truncate(len(index) + offset)
    aside.rename(path)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, in its order."""
    flat = tensor.detach().contiguous().view(-1)
    if not flat.numel():
        return memoryview(b"")
    viewed: memoryview = flat.view(torch.uint8).numpy().data
    return viewed


class HostCopy:
    """A copy that is open for reading; its pages count as this process's memory only until it is closed."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        end = self._memory.find(b"\n") + 1
        self._begin = end
        rows = json.loads(self._memory[:end])
        self.tensors = [StoredTensor(**{**row, "shape": tuple(row["shape"])}) for row in rows]

    def parts(self) -> Iterator[tuple[StoredTensor, memoryview]]:
        whole = memoryview(self._memory)
        try:
            for tensor in self.tensors:
                first = self._begin + tensor.offset
                with whole[first : first + tensor.length] as part:
                    yield tensor, part
        finally:
            whole.release()

    def __enter__(self) -> HostCopy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._memory.close()
