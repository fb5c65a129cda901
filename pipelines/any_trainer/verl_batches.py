"""Exported batches as verl's ``DataProto``. verl is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from heddle_dask.core.errors import BadInput
from heddle_dask.training.exports.verl import read_verl_step

TEMPERATURE = "temperature"


def verl_batch(path: Path) -> Any:
    """A ``verl.protocol.DataProto`` of an exported step (``heddle export --to verl``).

    Raises
    ------
    BadInput
        verl is not installed, or the file is none of this form.
    """
    return data_proto(read_verl_step(path))


def data_proto(columns: Mapping[str, npt.NDArray[Any]]) -> Any:
    """A ``verl.protocol.DataProto`` of the columns of `training.exports.verl`.

    Raises
    ------
    BadInput
        verl is not installed.
    """
    try:
        protocol = importlib.import_module("verl.protocol")
    except ImportError as error:
        raise BadInput(f"verl cannot be imported: {error}: pip install verl") from None
    tensors, texts, meta = verl_tensors(columns)
    return protocol.DataProto.from_dict(tensors=tensors, non_tensors=texts, meta_info=meta)


def verl_tensors(
    columns: Mapping[str, npt.NDArray[Any]],
) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """The tensors, the non-tensors and the meta information of a ``DataProto``."""
    tensors = {name: torch.from_numpy(one) for name, one in columns.items() if one.dtype != object}
    temperature = float(tensors.pop(TEMPERATURE)[0])
    texts = {name: one for name, one in columns.items() if one.dtype == object}
    return tensors, texts, {TEMPERATURE: temperature}
