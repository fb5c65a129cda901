"""safetensors files as bytes and their headers: no torch, and types that NumPy does not know (bfloat16).

The format: eight bytes (little endian) with the length of a JSON header, the header, the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from heddle_dask.core.plain_files import open_plain
from heddle_dask.core.value_types import check_types
from heddle_dask.weights.manifest import TensorFacts, WeightsRefused

ITEM_BYTES: Final[Mapping[str, int]] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
"""Size of one number of each type that can be published, by safetensors' name of the type."""

_NUMPY_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32"}
_LONGEST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as bytes: row-major, little endian.

    From torch: ``RawTensor(name, "BF16", tuple(t.shape), t.contiguous().view(torch.uint8).numpy())``.

    Attributes
    ----------
    dtype
        safetensors' name of the type (`ITEM_BYTES`).
    data
        A contiguous array of any type; its bytes count.

    Raises
    ------
    ValueError
        Type, shape and number of bytes contradict each other.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]

    def __post_init__(self) -> None:
        size = ITEM_BYTES.get(self.dtype)
        if size is None:
            raise ValueError(f"tensor {self.name} has type {self.dtype!r}: use {', '.join(ITEM_BYTES)}")
        expected = size * int(np.prod(self.shape, dtype=np.int64))
        if self.data.nbytes != expected or not self.data.flags.c_contiguous:
            raise ValueError(
                f"tensor {self.name} of shape {self.shape} and type {self.dtype} takes {expected} contiguous bytes, "
                f"not {self.data.nbytes}"
            )

    @classmethod
    def of(cls, name: str, array: npt.NDArray[Any]) -> RawTensor:
        """A tensor of a NumPy array of a type that safetensors has."""
        dtype = _NUMPY_NAMES.get(array.dtype.name)
        if dtype is None:
            raise ValueError(f"tensor {name} has type {array.dtype}: give RawTensor its bytes and type")
        return cls(name, dtype, array.shape, np.ascontiguousarray(array).reshape(array.shape))

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)

    @property
    def facts(self) -> TensorFacts:
        return TensorFacts(self.name, self.dtype, self.shape)


def file_parts(tensors: Sequence[RawTensor]) -> list[bytes | memoryview]:
    """The pieces of a safetensors file of these tensors, in order, without a copy of their data.

    Equal tensors give equal bytes, in whatever order they come.
    """
    # Large types first: the format wants each tensor aligned to its type.
    ordered = sorted(tensors, key=lambda one: (-ITEM_BYTES[one.dtype], one.name))
    # transformers refuses a file that does not name its framework's layout.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for one in ordered:
        header[one.name] = {
            "dtype": one.dtype,
            "shape": list(one.shape),
            "data_offsets": [at, at + one.nbytes],
        }
        at += one.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts: list[bytes | memoryview] = [struct.pack("<Q", len(text)) + text]
    return parts + [one.data.reshape(-1).view(np.uint8).data for one in ordered if one.nbytes]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in a file."""

    facts: TensorFacts
    start: int
    stop: int


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """The tensors of a safetensors file, without their data; positions count from the file's start.

    Raises
    ------
    WeightsRefused
        It is no whole safetensors file.
    """
    try:
        file = open_plain(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise WeightsRefused(f"{path.name} cannot be read: {error.strerror}") from None
    with file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = min(_header_bytes(start, path.name), _LONGEST_HEADER_BYTES, size)
        return _tensors(start + file.read(length), size, path.name)


def tensors_in(data: memoryview, name: str) -> tuple[StoredTensor, ...]:
    """`read_header` for a file of that name in memory."""
    start = bytes(data[:8])
    return _tensors(start + bytes(data[8 : 8 + _header_bytes(start, name)]), len(data), name)


def _header_bytes(start: bytes, name: str) -> int:
    try:
        return int(struct.unpack("<Q", start)[0])
    except struct.error as error:
        raise WeightsRefused(f"{name} is no safetensors file: {error}") from None


def _tensors(head: bytes, end: int, name: str) -> tuple[StoredTensor, ...]:
    try:
        length = _header_bytes(head[:8], name)
        if length > _LONGEST_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(head[8:])
        stored = tuple(_stored(key, entry, 8 + length) for key, entry in header.items() if key != "__metadata__")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsRefused(f"{name} is no safetensors file: {error}") from None
    for one in stored:
        if not 0 <= one.start <= one.stop <= end:
            raise WeightsRefused(f"{name} is cut short: {one.facts.name} ends at byte {one.stop} of {end}")
    return stored


def _stored(name: str, entry: Mapping[str, Any], base: int) -> StoredTensor:
    start, stop = entry["data_offsets"]
    stored = StoredTensor(TensorFacts(name, entry["dtype"], tuple(entry["shape"])), base + start, base + stop)
    check_types(stored)
    size = ITEM_BYTES.get(stored.facts.dtype)
    if min(stored.facts.shape, default=0) < 0 or (
        size is not None and stop - start != size * math.prod(stored.facts.shape)
    ):
        raise ValueError(f"{name} of shape {list(stored.facts.shape)} has {stop - start} bytes")
    return stored


def read_tensors(path: Path) -> Iterable[RawTensor]:
    """The tensors of a file, one after another, mapped and not copied; `WeightsRefused` as `read_header`."""
    for one in read_header(path):
        if one.facts.dtype not in ITEM_BYTES:
            raise WeightsRefused(
                f"{path.name}: tensor {one.facts.name} has type {one.facts.dtype!r:.40}, not a known one"
            )
        size = one.stop - one.start
        data = (
            np.memmap(path, dtype=np.uint8, mode="r", offset=one.start, shape=(size,))
            if size
            else np.empty(0, dtype=np.uint8)
        )
        yield RawTensor(one.facts.name, one.facts.dtype, one.facts.shape, data)
