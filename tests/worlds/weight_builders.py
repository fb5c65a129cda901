"""Model directories and stores of weights for tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from heddle_dask.weights.model_directory import weight_files
from heddle_dask.weights.tensor_files import RawTensor, file_parts, read_tensors


def tensors_of(directory: str | Path) -> Iterator[RawTensor]:
    """The tensors of a model directory."""
    for file in weight_files(directory):
        yield from read_tensors(file)


def perturbed(directory: str | Path, seed: int, scale: float = 0.02) -> list[RawTensor]:
    """The tensors of a float32 model directory with noise on its matrices."""
    random = np.random.default_rng(seed)
    found = []
    for tensor in tensors_of(directory):
        values = np.asarray(tensor.data).view("<f4").reshape(tensor.shape)
        noise = random.normal(0, scale, tensor.shape) if values.ndim > 1 else 0.0
        found.append(RawTensor.of(tensor.name, (values + noise).astype("<f4")))
    return found


def model_with(directory: Path, base: str | Path, tensors: list[RawTensor], name: str = "model.safetensors") -> Path:
    """A model directory with these weights, and all else of `base`."""
    shutil.copytree(base, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    (directory / name).write_bytes(b"".join(file_parts(tensors)))
    return directory


def changed(tensors: list[RawTensor], name: str, change: Callable[[RawTensor], RawTensor]) -> list[RawTensor]:
    """The tensors, one of them changed."""
    return [change(one) if one.name == name else one for one in tensors]
