"""Models from Hugging Face directories: whole on one device, or each rank its shard alone.

Shards are of FSDP2, also on one rank where the computation is in bfloat16: then the shards are the float32 master
weights, and a layer has its weights in bfloat16 only while it runs (docs/trainer.md has the bytes).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from heddle_dask.core.errors import BadInput
from heddle_dask.training.trainer_spec import TrainerSpec
from pipelines.grpo import attention

# Where an adapter has taken the place of a linear layer, the layer has this name in it.
_BELOW_ADAPTER = ".base_layer."


def stored_dtype(model: Path) -> torch.dtype:
    """The type of a model's weights on disk, by its configuration; checkpoints keep it."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    found = getattr(torch, str(name), None)
    return found if isinstance(found, torch.dtype) else torch.float32


def compute_dtype(spec: TrainerSpec) -> torch.dtype:
    """Of weights, activations and gradients while a layer runs."""
    if spec.dtype == "auto":
        return torch.bfloat16 if stored_dtype(Path(spec.model)).itemsize == 2 else torch.float32
    return torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32


def load_model(
    spec: TrainerSpec,
    directory: Path,
    device: torch.device,
    adapted: Callable[[Any], Any] = lambda model: model,
    *,
    frozen: bool = False,
) -> Any:
    """A causal language model without dropout, on a device or sharded over all ranks.

    Parameters
    ----------
    adapted
        Gives the model its adapter.
    frozen
        Nothing of the model itself is trained: it has no master weights.
    """
    if not (directory / "config.json").is_file():
        raise BadInput(f"model directory {directory} is no model: it has no config.json")
    dtype = compute_dtype(spec)
    sharded = spec.ranks > 1 or dtype != torch.float32
    try:
        if not sharded:
            return _without_dropout(adapted(_whole(spec, directory, torch.float32).to(device)))
        stored = dtype if frozen else torch.float32
        model = adapted(_empty(spec, directory, stored) or _whole(spec, directory, stored))
        _shard(model, spec, device, dtype)
        _fill(model, directory, device)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise BadInput(f"model directory {directory} cannot be loaded: {' '.join(str(error).split())}") from None
    return _without_dropout(model)


def _whole(spec: TrainerSpec, directory: Path, dtype: torch.dtype) -> Any:
    options = _attention(spec)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True, **options)


def _empty(spec: TrainerSpec, directory: Path, dtype: torch.dtype) -> Any:
    """The model with weights that have no memory yet; None where the files do not hold them as the model does."""
    try:
        from accelerate import init_empty_weights
    except ImportError:
        raise BadInput("a trainer in bfloat16 or of several ranks needs accelerate: `pip install accelerate`") from None
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **_attention(spec))
    model.tie_weights()
    stored = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    fitting = all(name in stored and stored[name].size == held.shape for name, held in _held(model).items())  # type: ignore[union-attr]
    return model if fitting else None


def _attention(spec: TrainerSpec) -> dict[str, Any]:
    return {"attn_implementation": attention.NAME} if spec.packed else {}


def _held(model: Any) -> dict[str, torch.Tensor]:
    """What the files of a model hold, by their names: tied weights once, and no adapter."""
    tensors = dict(model.named_parameters())
    persistent = model.state_dict(keep_vars=True)
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {name.replace(_BELOW_ADAPTER, "."): held for name, held in tensors.items() if "lora_" not in name}


def _shard(model: Any, spec: TrainerSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Shard over all ranks: a decoder layer at a time, and what is outside of layers."""
    if not dist.is_initialized():
        assert spec.ranks == 1, "join the ranks first"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    mesh = init_device_mesh(device.type, (spec.ranks,))
    # Layers are gathered in the type of the computation; gradients are summed, and added up over micro-batches, in
    # float32.
    half = dtype != torch.float32
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = set(getattr(whole, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in names:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)


def _fill(model: Any, directory: Path, device: torch.device) -> None:
    """Read this rank's part of each weight, and no other bytes of the files."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not any(weight.is_meta for weight in whole.parameters()):
        return
    for weight in whole.parameters():
        if weight.is_meta:
            real = torch.nn.Parameter(torch.empty_like(weight, device=device), requires_grad=weight.requires_grad)
            torch.utils.swap_tensors(weight, real)
    load(_held(whole), storage_reader=HuggingFaceStorageReader(str(directory)))


def _without_dropout(model: Any) -> Any:
    # Logprobs must be those of the engine, which has no dropout.
    if getattr(model.config, "attention_dropout", 0.0):
        model.config.attention_dropout = 0.0
    module: Any
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if getattr(module, "attention_dropout", 0.0):
            module.attention_dropout = 0.0
    return model.train()
