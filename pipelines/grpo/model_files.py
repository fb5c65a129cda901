"""A copy of the trained weights as files that transformers and vLLM read, and as the tensors of such files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.core_model_loading import revert_weight_conversion

from heddle_dask.core.errors import BadInput
from heddle_dask.weights.tensor_files import RawTensor
from pipelines.grpo.policy import Policy

# What an engine or transformers reads beside the weights, as it was in the model's directory.
_COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_TYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}

Weights = Mapping[str, torch.Tensor]
"""A copy of all trained weights (`Policy.copied_weights`)."""


def write_model(directory: Path, policy: Policy, weights: Weights) -> None:
    """Write a model directory, or the directory of an adapter."""
    source = Path(policy.spec.model)
    try:
        policy.model.save_pretrained(directory, state_dict=dict(weights))
    except SafetensorError as error:  # as of a full disk
        raise OSError(str(error)) from None
    for name in _COPIED:
        if (source / name).is_file() and not (policy.spec.lora_rank and name == "config.json"):
            shutil.copyfile(source / name, directory / name)


def raw_tensors(policy: Policy, weights: Weights) -> list[RawTensor]:
    """The tensors that `write_model` writes, without a copy of them."""
    if policy.spec.lora_rank:
        from peft import get_peft_model_state_dict

        stored = get_peft_model_state_dict(policy.model, state_dict=dict(weights))
    else:
        stored = revert_weight_conversion(policy.model, dict(weights))
    return [_raw(name, tensor) for name, tensor in stored.items()]


def _raw(name: str, tensor: torch.Tensor) -> RawTensor:
    if tensor.dtype not in _TYPES:
        raise BadInput(f"tensor {name} has type {tensor.dtype}: it cannot be published")
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return RawTensor(name, _TYPES[tensor.dtype], tuple(tensor.shape), data)
