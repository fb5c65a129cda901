"""The model that is trained: loaded, with an adapter or not, on one rank or spread over several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from heddle_dask.core.errors import BadInput
from heddle_dask.training.trainer_spec import TrainerSpec
from pipelines.grpo.model_loading import compute_dtype, load_model

ADAPTER_WEIGHTS = "adapter_model.safetensors"
# PEFT's name of the only adapter.
_ADAPTER = "default"
# Frozen weights, those below an adapter, never change.
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)


def device_of(spec: TrainerSpec, rank: int) -> torch.device:
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if spec.device == "cpu" or (spec.device == "auto" and not there):
        return torch.device("cpu")
    if spec.ranks > there:
        raise BadInput(f"trainer ranks are {spec.ranks}: this worker sees {there} GPUs")
    return torch.device("cuda", rank)


class Policy:
    """The weights that are trained, and how they are read and restored.

    Parameters
    ----------
    weights
        Model directory, or the checkpoint of an adapter.

    Attributes
    ----------
    model
        Takes micro-batches; with several ranks, they run it together.
    vocabulary, longest
        Number of token ids, and the most tokens of a sequence.
    """

    def __init__(self, spec: TrainerSpec, weights: Path, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        adapter = weights if (weights / ADAPTER_WEIGHTS).exists() else None
        if adapter and not spec.lora_rank:
            raise BadInput(f"{weights} is a checkpoint of an adapter: set lora_rank as in its run")
        self._second_names: set[str] = set()
        lora = bool(spec.lora_rank)
        source = Path(spec.model) if adapter else weights
        model = load_model(spec, source, device, partial(self._adapted, adapter), frozen=lora)
        self.vocabulary = int(model.config.vocab_size)
        self.longest = int(getattr(model.config, "max_position_embeddings", 1 << 30))
        if recomputes(spec, device):
            # Nothing is drawn at random in a layer.
            again = {"use_reentrant": False, "preserve_rng_state": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=again)
        self.model: Any = model
        self.trained = [weight for weight in model.parameters() if weight.requires_grad]

    def _adapted(self, stored: Path | None, model: Any) -> Any:
        if self.spec.lora_rank:
            model = with_adapter(model, self.spec, stored)
        whole = {name for name, _ in model.named_parameters()}
        # Tied weights have several names; sharded ones could not be told from others that are equal.
        self._second_names = {name for name, _ in model.named_parameters(remove_duplicate=False)} - whole
        return model

    def state(self) -> dict[str, torch.Tensor]:
        """The trained weights as a whole, float32, on the CPU, tied ones once; all ranks ask, the first gets them."""
        state: dict[str, Any] = dict(get_model_state_dict(self.model, options=_FULL))
        return {name: tensor for name, tensor in state.items() if name not in self._second_names}

    def restore(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state, options=StateDictOptions(full_state_dict=True, strict=False))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return dict(get_optimizer_state_dict(self.model, optimizer, options=_FULL))

    def restore_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, optimizer, state, options=StateDictOptions(full_state_dict=True))

    @contextmanager
    def without_adapter(self) -> Iterator[Any]:
        """The model as it was before training, where an adapter is trained."""
        with self.model.disable_adapter():
            # PEFT freezes what it disables; shards that are gathered so for the first time would stay frozen.
            for weight in self.trained:
                weight.requires_grad_(True)
            yield self.model


def load_reference(spec: TrainerSpec, device: torch.device) -> Any:
    """The model that the policy stays near to."""
    return load_model(spec, Path(spec.reference or spec.model), device, frozen=True).requires_grad_(False)


def recomputes(spec: TrainerSpec, device: torch.device) -> bool:
    """Whether activations are computed again in the backward pass."""
    if spec.gradient_checkpointing != "auto":
        return spec.gradient_checkpointing
    return device.type == "cuda" or compute_dtype(spec) != torch.float32


def with_adapter(model: Any, spec: TrainerSpec, stored: Path | None) -> Any:
    """The model with a new adapter, or with a stored one, that is trained in its place."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.tuners.lora import LoraLayer

    if stored is not None:
        return PeftModel.from_pretrained(model, stored, is_trainable=True, low_cpu_mem_usage=True)
    targets: Any = spec.lora_targets
    if targets != "all-linear":
        targets = targets.split(",")
    torch.manual_seed(spec.seed)
    config = LoraConfig(
        r=spec.lora_rank,
        lora_alpha=spec.lora_alpha,  # type: ignore[arg-type]
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=spec.model,
    )
    adapted = get_peft_model(model, config)
    for layer in adapted.modules():
        # Over a layer whose weights are yet to be read, the adapter has got no memory either.
        if isinstance(layer, LoraLayer) and layer.lora_A[_ADAPTER].weight.is_meta:
            for name in layer.adapter_layer_names:
                getattr(layer, name).to_empty(device="cpu")
            layer.reset_lora_parameters(_ADAPTER, True)
    return adapted
