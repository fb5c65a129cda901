"""The model that is trained: loaded, with an adapter or not, on one rank or spread over several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from heddle_dask.core.errors import BadInput
from heddle_dask.training.trainer_spec import TrainerSpec
from pipelines.grpo.model_loading import compute_dtype, load_model

# PEFT's name of the only adapter.
_ADAPTER = "default"
# Frozen weights, those below an adapter, never change.
_TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True)


def device_of(spec: TrainerSpec, rank: int) -> torch.device:
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if spec.device == "cpu" or (spec.device == "auto" and not there):
        return torch.device("cpu")
    if spec.ranks > there:
        raise BadInput(f"trainer ranks are {spec.ranks}: this worker sees {there} GPUs")
    return torch.device("cuda", rank)


class Policy:
    """The weights that are trained; those of the model's directory at first.

    Attributes
    ----------
    model
        Takes micro-batches; with several ranks, they run it together.
    vocabulary, longest
        Number of token ids, and the most tokens of a sequence.
    """

    def __init__(self, spec: TrainerSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self._second_names: set[str] = set()
        model = load_model(spec, Path(spec.model), device, self._adapted, frozen=bool(spec.lora_rank))
        self.vocabulary = int(model.config.vocab_size)
        self.longest = int(getattr(model.config, "max_position_embeddings", 1 << 30))
        if recomputes(spec, device):
            # Nothing is drawn at random in a layer.
            again = {"use_reentrant": False, "preserve_rng_state": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=again)
        self.model: Any = model
        self.trained = [weight for weight in model.parameters() if weight.requires_grad]

    def _adapted(self, model: Any) -> Any:
        if self.spec.lora_rank:
            model = with_adapter(model, self.spec)
        whole = {name for name, _ in model.named_parameters()}
        # Tied weights have several names; sharded ones could not be told from others that are equal.
        self._second_names = {name for name, _ in model.named_parameters(remove_duplicate=False)} - whole
        return model

    def weights(self) -> dict[str, torch.Tensor]:
        """Trained weights and buffers, tied ones once, as this rank holds them: shards where the model is sharded."""
        state: dict[str, Any] = dict(get_model_state_dict(self.model, options=_TRAINED_ONLY))
        return {name: tensor for name, tensor in state.items() if name not in self._second_names}

    @torch.no_grad()
    def copied_weights(self, dtype: torch.dtype | None, rank: int) -> dict[str, torch.Tensor]:
        """A copy in the host's memory, gathered tensor by tensor; all ranks ask, the first gets it.

        Parameters
        ----------
        dtype
            Of the copies of weights; None: as they are.
        """
        copies = {}
        for name, held in self.weights().items():
            whole: torch.Tensor = held.full_tensor() if hasattr(held, "full_tensor") else held
            if rank == 0:
                cast = whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole
                copies[name] = torch.empty_like(cast, device="cpu").copy_(cast)
        return copies

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


def with_adapter(model: Any, spec: TrainerSpec) -> Any:
    """The model with a new adapter that is trained in its place."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

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
