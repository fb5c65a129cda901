"""Arithmetic on tensors of types that NumPy lacks: bfloat16 is the upper half of float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from heddle_dask.weights.manifest import WeightsRefused
from heddle_dask.weights.tensor_files import RawTensor


def to_float32(tensor: RawTensor) -> npt.NDArray[np.float32]:
    """The numbers of a tensor.

    Raises
    ------
    WeightsRefused
        Its type has no arithmetic here, such as a quantised one.
    """
    raw = np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8)
    if tensor.dtype == "BF16":
        values = (raw.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    elif tensor.dtype in ("F32", "F16"):
        values = raw.view({"F32": "<f4", "F16": "<f2"}[tensor.dtype]).astype(np.float32)
    else:
        raise WeightsRefused(
            f"tensor {tensor.name} has type {tensor.dtype}: an adapter needs F32, F16 or BF16"
        )
    return values.reshape(tensor.shape)


def from_float32(name: str, dtype: str, values: npt.NDArray[np.float32]) -> RawTensor:
    """A tensor of these numbers, each rounded to the nearest of its type, ties to even."""
    shape = values.shape
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, dtype="<f4").reshape(-1).view("<u4")
        rounded = (
            (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        ).astype("<u2")
        # The sum above would turn some patterns of "not a number" into infinity or zero.
        data: npt.NDArray[Any] = np.where(np.isnan(values.reshape(-1)), np.uint16(0x7FC0), rounded).astype(
            "<u2"
        )
    elif dtype in ("F32", "F16"):
        data = np.ascontiguousarray(values, dtype={"F32": "<f4", "F16": "<f2"}[dtype])
    else:
        raise WeightsRefused(f"tensor {name} has type {dtype}: an adapter needs F32, F16 or BF16")
    return RawTensor(name, dtype, shape, data)
