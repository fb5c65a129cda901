"""The model that is trained: loaded, with an adapter or not, on one rank or spread over several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from heddle_dask.core.errors import BadInput
from heddle_dask.training.trainer_spec import TrainerSpec
from pipelines.grpo import attention

ADAPTER_WEIGHTS = "adapter_model.safetensors"
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
        model = load_model(spec, Path(spec.model) if adapter else weights, device)
        self.vocabulary = int(model.config.vocab_size)
        self.longest = int(getattr(model.config, "max_position_embeddings", 1 << 30))
        if spec.lora_rank:
            model = with_adapter(model, spec, adapter)
        elif adapter:
            raise BadInput(f"{weights} is a checkpoint of an adapter: set lora_rank as in its run")
        if spec.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        self.model: Any = model
        whole = {name for name, _ in model.named_parameters()}
        # Tied weights have several names; sharded ones could not be told from others that are equal.
        self._second_names = {name for name, _ in model.named_parameters(remove_duplicate=False)} - whole
        if spec.ranks > 1:
            _spread(model, spec, device)
        self.trained = [weight for weight in model.parameters() if weight.requires_grad]

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
            yield self.model


def load_model(spec: TrainerSpec, directory: Path, device: torch.device) -> Any:
    """A causal language model in float32, without dropout, on a device."""
    chosen = {"attn_implementation": attention.NAME} if spec.packed else {}
    if not (directory / "config.json").is_file():
        raise BadInput(f"model directory {directory} is no model: it has no config.json")
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True, **chosen)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"model directory {directory} cannot be loaded: {' '.join(str(error).split())}") from None
    # Logprobs must be those of the engine, which has no dropout.
    if getattr(model.config, "attention_dropout", 0.0):
        model.config.attention_dropout = 0.0
    module: Any
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if getattr(module, "attention_dropout", 0.0):
            module.attention_dropout = 0.0
    return model.train().to(device)


def with_adapter(model: Any, spec: TrainerSpec, stored: Path | None) -> Any:
    """The model with a new adapter, or with a stored one, that is trained in its place."""
    from peft import LoraConfig, PeftModel, get_peft_model

    if stored is not None:
        return PeftModel.from_pretrained(model, stored, is_trainable=True)
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
    return get_peft_model(model, config)


def _spread(model: Any, spec: TrainerSpec, device: torch.device) -> None:
    """Shard over all ranks: a decoder layer at a time, and what is outside of layers."""
    assert dist.is_initialized(), "join the ranks first"
    mesh = init_device_mesh(device.type, (spec.ranks,))
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = set(getattr(whole, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in names:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
