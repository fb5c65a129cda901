"""Exported batches as verl's ``DataProto``. verl is imported when it is asked for."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from heddle_dask.core.errors import BadInput
from heddle_dask.training.exports.verl import read_verl_step

TEMPERATURE = "temperature"


def verl_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """The tensors, the non-tensors and the meta information of an exported step.

    Raises
    ------
    BadInput
    """
    columns = read_verl_step(path)
    temperature = float(columns.pop(TEMPERATURE)[0])
    tensors = {name: torch.from_numpy(one) for name, one in columns.items() if one.dtype != object}
    texts = {name: one for name, one in columns.items() if one.dtype == object}
    return tensors, texts, {TEMPERATURE: temperature}


def verl_batch(path: Path) -> Any:
    """A ``verl.protocol.DataProto`` of an exported step (``heddle export --as verl``).

    Raises
    ------
    BadInput
        verl is not installed, or the file is none of this form.
    """
    try:
        protocol = importlib.import_module("verl.protocol")
    except ImportError as error:
        raise BadInput(f"verl cannot be imported: {error}: pip install verl") from None
    tensors, texts, meta = verl_tensors(path)
    return protocol.DataProto.from_dict(tensors=tensors, non_tensors=texts, meta_info=meta)
