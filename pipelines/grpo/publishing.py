"""A checkpoint becomes a version in the weight store: its files are read, not the weights in training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.weights.adapters import merged
from heddle_dask.weights.manifest import AdapterFacts
from heddle_dask.weights.model_directory import model_facts, weight_files, weights_digest
from heddle_dask.weights.store import WeightStore
from heddle_dask.weights.tensor_files import RawTensor, read_tensors
from pipelines.grpo.policy import ADAPTER_WEIGHTS


def publish(model: Path, weights: Path, version: PolicyVersion, store: str) -> str:
    """Write weights into the store; returns the URI of the manifest. Writing the same again changes nothing.

    For a broadcast only the manifest is written, and an adapter is merged here: the receivers take whole weights.

    Parameters
    ----------
    model
        Model directory of the run: shape and tokenizer, and what an adapter is added to.
    weights
        A checkpoint, or the model directory itself.
    """
    place = WeightStore(store)
    if place.is_broadcast:
        return place.write_manifest(version, whole_weights(model, weights), model_facts(model))
    adapter = _adapter(model, weights) if (weights / ADAPTER_WEIGHTS).exists() else None
    return place.write(version, _stored(weights), model_facts(model), adapter=adapter)


def whole_weights(model: Path, weights: Path) -> Iterator[RawTensor]:
    """All tensors of a checkpoint; an adapter is merged with the model."""
    if not (weights / ADAPTER_WEIGHTS).exists():
        return _stored(weights)
    adapter = {tensor.name: tensor for tensor in _stored(weights)}
    return merged(_stored(model), adapter, _adapter(model, weights))


def _stored(directory: Path) -> Iterator[RawTensor]:
    return (tensor for file in weight_files(directory) for tensor in read_tensors(file))


def _adapter(model: Path, weights: Path) -> AdapterFacts:
    config = json.loads((weights / "adapter_config.json").read_text(encoding="utf-8"))
    if config.get("use_rslora") or config.get("use_dora"):
        raise BadInput(f"the adapter of {weights} is not a plain LoRA: it cannot be published")
    return AdapterFacts(int(config["r"]), config["lora_alpha"] / config["r"], weights_digest(model))
