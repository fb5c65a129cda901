"""What lies in a weight store, beside the weights of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from heddle_dask.weights.tensor_files import read_tensors


def published_are(state: Mapping[str, torch.Tensor], store: Path) -> bool:
    """Whether the weights in the store are these, bit for bit."""
    published = [one for path in store.rglob("*.safetensors") for one in read_tensors(path)]
    return bool(published) and all(bytes(one.data) == state[one.name].detach().numpy().tobytes() for one in published)
