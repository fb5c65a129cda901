"""Tensors of PyTorch as weights are published."""

from __future__ import annotations

from typing import Final

import torch

from heddle_dask.core.errors import BadInput
from heddle_dask.weights.tensor_files import RawTensor

_NAMES: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


def raw_tensor(name: str, tensor: torch.Tensor) -> RawTensor:
    """The bytes of a tensor on any device, as they are.

    Raises
    ------
    BadInput
        Its type is none in which weights are published.
    """
    if tensor.dtype not in _NAMES:
        raise BadInput(f"tensor {name} has type {tensor.dtype}: publish float32, bfloat16 or float16")
    plain = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return RawTensor(name, _NAMES[tensor.dtype], tuple(tensor.shape), plain.numpy())
