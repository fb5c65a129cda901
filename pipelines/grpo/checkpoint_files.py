"""The files of a checkpoint: a Hugging Face directory, and the state of the trainer beside it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heddle_dask.core.errors import BadInput
from pipelines.grpo.model_loading import stored_dtype
from pipelines.grpo.policy import Policy

TRAINER_STATE = "trainer.pt"
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


def write_model(directory: Path, policy: Policy, state: Mapping[str, torch.Tensor]) -> None:
    """Write weights so that transformers and vLLM load them.

    Parameters
    ----------
    state
        As `Policy.state` gives it.
    """
    source = Path(policy.spec.model)
    if policy.spec.lora_rank:
        policy.model.save_pretrained(directory, state_dict=dict(state))
    else:
        dtype = stored_dtype(source)
        cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
        policy.model.save_pretrained(directory, state_dict=cast)
    for name in _COPIED:
        if (source / name).is_file() and not (policy.spec.lora_rank and name == "config.json"):
            shutil.copyfile(source / name, directory / name)


def write_trainer_state(
    directory: Path,
    policy: Policy,
    state: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Any],
    random_states: list[dict[str, Any]],
) -> None:
    """Write what a restart needs beside the weights.

    Parameters
    ----------
    random_states
        One of each rank.
    """
    exact = bool(policy.spec.lora_rank) or stored_dtype(Path(policy.spec.model)) == torch.float32
    body = {
        "optimizer": dict(optimizer),
        # The weights in float32, where the files have less.
        "master": None if exact else dict(state),
        "random": random_states,
    }
    torch.save(body, directory / TRAINER_STATE)


def read_trainer_state(directory: Path) -> dict[str, Any]:
    try:
        body: dict[str, Any] = torch.load(directory / TRAINER_STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has no error of its own
        raise BadInput(
            f"the trainer state of checkpoint {directory} cannot be read: {' '.join(str(error).split())[:200]}"
        ) from None
    return body


def random_state() -> dict[str, Any]:
    """The states of all random generators of this process, as plain values and tensors."""
    version, words, gauss = random.getstate()
    drawn: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = drawn
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
