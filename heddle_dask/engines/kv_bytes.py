"""How large the KV cache of a token is, as far as an engine's spec tells."""

from __future__ import annotations

from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.model_config import read_shape
from heddle_dask.engines.emulated.traits import traits_of
from heddle_dask.engines.spec import EngineSpec


def kv_bytes_per_token(spec: EngineSpec) -> float:
    """Bytes of KV cache of one token over all layers, in the model's own precision; 0.0 when nobody knows.

    For vLLM from the ``config.json`` of a model directory; a name on a hub, or a model whose shape cannot be read, says
    nothing.
    """
    if spec.kind == "emulated":
        return float(traits_of(spec).emulation.kv_bytes_per_token)
    if not Path(spec.model).is_dir():
        return 0.0
    try:
        return read_shape(spec.model).kv_bytes_per_token
    except BadInput:
        return 0.0
