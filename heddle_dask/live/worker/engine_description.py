"""What a rollout worker says of its engine to the control plane."""

from __future__ import annotations

import json
import os

from heddle_dask.core.ids import EngineId
from heddle_dask.core.nouns import EngineDescription
from heddle_dask.engines.contract import EngineInfo
from heddle_dask.engines.spec import EngineSpec, engine_kind
from heddle_dask.live.wire.messages import HARDWARE_VARIABLE


def described_engine(engine_id: str, spec: EngineSpec, info: EngineInfo) -> EngineDescription:
    """The engine with the weights that it was started with. It reads the model's configuration and asks nvidia-smi."""
    kind = engine_kind(spec.kind)
    cost = kind.believed_cost(spec)
    return EngineDescription(
        engine_id=EngineId(engine_id),
        slots=info.slots,
        max_context_tokens=info.max_model_len,
        tp_degree=spec.tp_degree,
        kv_capacity_tokens=info.kv_capacity_tokens,
        kv_transfer=spec.kv_transfer,
        kv_bytes_per_token=kind.kv_bytes_per_token(spec),
        hardware=os.environ.get(HARDWARE_VARIABLE) or spec.hardware,
        cost="" if cost is None else json.dumps(cost.to_mapping()),
    )
