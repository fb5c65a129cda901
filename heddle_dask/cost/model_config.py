"""The shape of a model from its ``config.json``: dense Llama-like models and Qwen3's mixtures of experts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.hardware import ModelShape

DENSE = ("llama", "qwen2", "qwen3")
SPARSE = ("qwen3_moe",)
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def read_shape(directory: str | Path) -> ModelShape:
    return shape_of_config(read_config(directory), str(Path(directory) / "config.json"))


def read_config(directory: str | Path) -> dict[str, Any]:
    """The parsed config.json of the model in a directory."""
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"model directory {directory} has no readable config.json: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise BadInput(f"{path} is no JSON object: give a model's config.json")
    return config


def shape_of_config(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """The shape that a parsed config.json describes.

    Weights are counted tensor by tensor as the architecture defines them (for the Qwen3 models the counts equal those
    on the hub). The weights' type is `torch_dtype` (`dtype`), bfloat16 if absent.

    Raises
    ------
    BadInput
        The architecture is neither in `DENSE` nor in `SPARSE`, weights are quantised, attention is a sliding window, or
        a value is missing.
    """
    kind = config.get("model_type")
    if kind not in DENSE + SPARSE:
        raise BadInput(f"{where}: architecture {kind!r} is unknown: use {', '.join(DENSE + SPARSE)}")
    if config.get("quantization_config"):
        raise BadInput(f"{where}: quantised weights are not modelled: use the model in bfloat16")
    if config.get("use_sliding_window"):
        raise BadInput(f"{where}: sliding-window attention is not modelled: use a model without it")
    layers, hidden, heads = (
        _whole(config, name, where) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    kv_heads = _whole(config, "num_key_value_heads", where, heads)
    head_dim = _whole(config, "head_dim", where, hidden // heads)
    item_bytes = _item_bytes(config, where)
    sparse = _sparse_layers(config, layers, where) if kind in SPARSE else 0
    outside = _attention_weights(config, hidden, heads, kv_heads, head_dim) * layers
    if layers > sparse:
        outside += 3 * hidden * _whole(config, "intermediate_size", where) * (layers - sparse)
    # Two norms per layer and the final norm; the token embedding, once or twice (output head).
    outside += 2 * hidden * layers + hidden
    outside += _whole(config, "vocab_size", where) * hidden * (1 if config.get("tie_word_embeddings") else 2)
    experts = per_token = inside = 0
    if sparse:
        experts, per_token, expert_size = (
            _whole(config, name, where) for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        )
        outside += hidden * experts * sparse  # the routers
        inside = 3 * hidden * expert_size * experts * sparse
    return ModelShape(
        parameters=outside + inside,
        weight_bytes=(outside + inside) * item_bytes,
        layers=layers,
        hidden_size=hidden,
        kv_bytes_per_token=2 * layers * kv_heads * head_dim * item_bytes,
        heads=heads,
        kv_heads=kv_heads,
        active_parameters=outside + inside * per_token // experts if sparse else 0,
        experts=experts,
        experts_per_token=per_token,
        expert_bytes=inside * item_bytes,
    )


def _attention_weights(config: Mapping[str, Any], hidden: int, heads: int, kv_heads: int, head_dim: int) -> int:
    weights = hidden * head_dim * (2 * heads + 2 * kv_heads)
    if str(config["model_type"]).startswith("qwen3"):
        weights += 2 * head_dim  # norms of queries and keys
    if config["model_type"] == "qwen2" or config.get("attention_bias"):
        weights += head_dim * (heads + 2 * kv_heads)
    return weights


def _sparse_layers(config: Mapping[str, Any], layers: int, where: str) -> int:
    step = _whole(config, "decoder_sparse_step", where, 1)
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise BadInput(f"{where}: mlp_only_layers is {dense!r}: give a list of layer numbers")
    return sum(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _item_bytes(config: Mapping[str, Any], where: str) -> int:
    name = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if name not in _BYTES:
        raise BadInput(f"{where}: type {name!r} of the weights is unknown: use {', '.join(_BYTES)}")
    return _BYTES[name]


def _whole(config: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadInput(f"{where}: {name} is {value!r}: give a whole number above 0")
    return value
