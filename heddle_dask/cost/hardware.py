"""From the shapes of a model and a GPU to the terms of an engine iteration.

The formula was fitted by hand to 16 public points (vLLM on H100, bf16: Qwen3 8B, 14B and 32B at TP 1
and 2; mean error 3 %, worst 11 %); `tests/test_cost_hardware.py` holds those points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from heddle_dask.core.errors import BadInput

_LAUNCH_S = 0.5e-3
_LAYER_S = 20e-6
_SEQUENCE_S = 25e-6
_WEIGHT_READ_SHARE = 0.80
_KV_READ_SHARE = 0.85
_PEAK_SHARE = 0.70
_MEMORY_SHARE = 0.88
_WORKSPACE_BYTES_PER_GPU = 2e9


@dataclass(frozen=True, slots=True)
class _Shape:
    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise BadInput(f"{type(self).__name__} {field.name} is {value!r}: use a number above 0")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Read a shape from parsed JSON or TOML; an unknown or missing key is BadInput."""
        known = [field.name for field in fields(cls)]
        wrong = sorted(set(mapping) ^ set(known))
        if wrong:
            verb = "lacks" if wrong[0] in known else "has unknown key"
            raise BadInput(f"{cls.__name__} {verb} {wrong[0]!r}: give {', '.join(known)}")
        return cls(**mapping)


@dataclass(frozen=True, slots=True)
class ModelShape(_Shape):
    """What of a dense transformer decides its speed.

    Attributes
    ----------
    parameters
        Number of weights.
    weight_bytes
        Bytes of all weights as loaded.
    kv_bytes_per_token
        Bytes of keys and values of one token over all layers.
    """

    parameters: float
    weight_bytes: float
    layers: int
    hidden_size: int
    kv_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Gpu(_Shape):
    """What of a GPU decides an engine's speed.

    Attributes
    ----------
    flops_per_s
        Dense peak in the weights' type.
    memory_bytes_per_s, memory_bytes
        HBM bandwidth and size.
    link_bytes_per_s
        All-reduce bandwidth between GPUs of one engine.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float


def all_reduce_s(tp_degree: int) -> float:
    """Seconds of one small all-reduce; 7, 9 and 12 microseconds at TP 2, 4 and 8."""
    if tp_degree == 1:
        return 0.0
    if tp_degree <= 2:
        return 7e-6
    return 9e-6 if tp_degree <= 4 else 12e-6


def iteration_terms(model: ModelShape, gpu: Gpu, tp_degree: int) -> dict[str, float]:
    """The terms of `heddle_dask.cost.engine_cost.EngineCost` but the KV capacity."""
    reduces = 2 * model.layers * all_reduce_s(tp_degree)
    token_s = 2 * model.parameters / (tp_degree * _PEAK_SHARE * gpu.flops_per_s)
    if tp_degree > 1:
        # Two all-reduces per layer move one hidden state of 2 bytes an element each.
        token_s += 2 * model.layers * model.hidden_size * 2 / gpu.link_bytes_per_s
    return {
        "fixed_s": _LAUNCH_S
        + model.layers * _LAYER_S
        + reduces
        + model.weight_bytes / (tp_degree * _WEIGHT_READ_SHARE * gpu.memory_bytes_per_s),
        "token_s": token_s,
        "prefill_token_s": token_s,
        "sequence_s": _SEQUENCE_S,
        "context_token_s": model.kv_bytes_per_token / (tp_degree * _KV_READ_SHARE * gpu.memory_bytes_per_s),
    }


def kv_capacity_tokens(model: ModelShape, gpu: Gpu, tp_degree: int) -> int:
    """Tokens whose KV fits beside the weights.

    Raises
    ------
    BadInput
        None fits.
    """
    room = (
        _MEMORY_SHARE * gpu.memory_bytes * tp_degree
        - model.weight_bytes
        - _WORKSPACE_BYTES_PER_GPU * tp_degree
    )
    tokens = int(room // model.kv_bytes_per_token)
    if tokens < 1:
        raise BadInput(
            f"model of {model.weight_bytes / 1e9:.0f} GB does not fit on {tp_degree} GPUs of "
            f"{gpu.memory_bytes / 1e9:.0f} GB: use a larger TP degree"
        )
    return tokens
