"""Bytes and seconds of the trainer of `pipelines.grpo` on each GPU, by the shape of a dense model.

What the formula counts is what `pipelines/grpo/model_loading.py` does: FSDP2 over `ranks` GPUs (also over one), a layer
gathered in the type of the computation while it runs, float32 master weights, gradients and moments of AdamW in shards,
the input of each layer kept and the rest computed again in the backward pass, logits in chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.hardware import WORKSPACE_BYTES_PER_GPU, Gpu
from heddle_dask.cost.model_config import shape_of_config

TRAINED_BYTES = 16
"""Of a trained parameter: float32 master weight 4, gradient 4, two moments of AdamW 8; divided by the ranks."""
OPTIMIZER_BYTES = 4
"""Of a trained parameter while the optimiser takes its step: one float32 intermediate; divided by the ranks."""
LOGITS_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at the same time."""
LOGIT_BYTES = 14
"""Of a token and a vocabulary entry of the chunk: as computed 2, float32 4, its logprob 4, its gradient 4."""
MEMORY_SHARE = 0.92
"""Share of the memory that can be had: the rest is lost between blocks of PyTorch's allocator. Assumption."""
PEAK_SHARE = 0.25
"""Share of the dense peak that a step reaches, computing again counted as work. Assumption: torchtitan's Llama 3.1 8B
on 8 H100, without compilation and with sequences of one length, makes 5,762 tokens per second and GPU (its
docs/performance.md), at most 0.42 of the peak by this count; RollArt's production steps, which are ragged, come to 0.1
(``benchmarks/rollart/training/times.py``, fitted)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """Sizes of a dense model that decide the memory of its training.

    Attributes
    ----------
    outside
        Parameters outside of the layers: embedding, head, final norm.
    queries, keys
        Elements of a token's queries, and of its keys, in a layer.
    inner
        Width of the MLP.
    """

    parameters: int
    outside: int
    layers: int
    hidden: int
    queries: int
    keys: int
    inner: int
    vocabulary: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any], where: str = "config.json") -> TrainedModel:
        """From a parsed config.json that `shape_of_config` reads.

        Raises
        ------
        BadInput
            The model is a mixture of experts, or of an unknown architecture.
        """
        shape = shape_of_config(config, where)
        if shape.experts:
            raise BadInput(f"{where}: training a mixture of experts is not modelled: use a dense model")
        head_size = int(config.get("head_dim") or shape.hidden_size // shape.heads)
        vocabulary = int(config["vocab_size"])
        embeddings = vocabulary * shape.hidden_size * (1 if config.get("tie_word_embeddings") else 2)
        return cls(
            parameters=int(shape.parameters),
            outside=embeddings + shape.hidden_size,
            layers=shape.layers,
            hidden=shape.hidden_size,
            queries=shape.heads * head_size,
            keys=shape.kv_heads * head_size,
            inner=int(config["intermediate_size"]),
            vocabulary=vocabulary,
        )

    @property
    def layer(self) -> float:
        """Parameters of one layer."""
        return (self.parameters - self.outside) / self.layers

    def adapter(self, rank: int) -> int:
        """Parameters of an adapter of that rank on all linear modules of the layers."""
        attention = 2 * (self.hidden + self.queries) + 2 * (self.hidden + self.keys)
        return rank * self.layers * (attention + 3 * (self.hidden + self.inner))

    @property
    def layer_activations(self) -> int:
        """Elements that one layer keeps for its backward pass, for each token.

        Norms keep a float32 copy of their input and what they give, linear modules their input, attention its queries,
        keys and values before and after they are turned, and the MLP four times its width; half as much again of the
        MLP are gradients on their way.
        """
        return 12 * self.hidden + 5 * (self.queries + self.keys) + 6 * self.inner


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup:
    """How a trainer is set up, as far as its memory and its seconds depend on it.

    Attributes
    ----------
    lora_rank
        0: all weights are trained.
    pass_tokens
        Tokens of one pass of the model on each GPU: a micro-batch, or the longest sequence where that is longer.
    item_bytes
        Of the computation: 2 (bfloat16) or 4.
    recompute
        Activation checkpointing.
    reference
        Another model is kept for a divergence.
    passes, forwards
        Over a batch with gradients; and without, for logprobs before the step or of a reference.
    """

    ranks: int = 1
    lora_rank: int = 0
    pass_tokens: int = 8192
    item_bytes: int = 2
    recompute: bool = True
    logits_chunk_tokens: int = LOGITS_CHUNK_TOKENS
    reference: bool = False
    passes: int = 1
    forwards: int = 0


@dataclass(frozen=True, slots=True)
class TrainerBytes:
    """Bytes of a trainer on each of its GPUs at its peak, by what has them.

    Attributes
    ----------
    states
        What is there at all times: master weights, gradients and moments, and the weights that are not trained.
    gathered
        Weights and gradients of what runs, whole.
    activations, logits
        Of one pass. The layer that is computed again and the logits do not exist at the same time: `logits` is what
        they have beyond it.
    workspace
        CUDA's context, communication, kernels.
    """

    states: float
    gathered: float
    activations: float
    logits: float
    workspace: float = WORKSPACE_BYTES_PER_GPU

    @property
    def total(self) -> float:
        return self.states + self.gathered + self.activations + self.logits + self.workspace

    @property
    def needed_memory_bytes(self) -> float:
        """Memory of a GPU on which the trainer has room."""
        return self.total / MEMORY_SHARE


def trainer_bytes(model: TrainedModel, setup: TrainerSetup) -> TrainerBytes:
    """Peak bytes on each GPU: of a pass, of the last sum of gradients, or of the optimiser's step, the largest."""
    item = setup.item_bytes
    adapter = model.adapter(setup.lora_rank)
    trained = adapter or model.parameters
    frozen = model.parameters * ((1 if adapter else 0) + (1 if setup.reference else 0))
    states = (TRAINED_BYTES * trained + item * frozen) / setup.ranks
    # Two layers at once, since the next is fetched while one runs; a gradient as computed, and in float32 to be summed.
    gathered = item * (model.outside + 2 * model.layer)
    outside_gradients = 0.0
    if not adapter:
        gathered += (item + 4) * model.layer + item * model.outside
        outside_gradients = (item + 4) * model.outside
    inputs, layer = model.layers * model.hidden * item, model.layer_activations * item
    logits = LOGIT_BYTES * model.vocabulary * min(setup.logits_chunk_tokens, setup.pass_tokens)
    if setup.recompute:
        activations = setup.pass_tokens * (inputs + layer)
        # Logits go before the first layer is computed again.
        beyond = max(0.0, logits - setup.pass_tokens * layer)
    else:
        activations, beyond = setup.pass_tokens * model.layers * layer, float(logits)
    in_pass = TrainerBytes(states, gathered, activations, beyond)
    summing = item * model.outside + outside_gradients
    stepping = OPTIMIZER_BYTES * trained / setup.ranks
    after = max(summing, stepping)
    ending = TrainerBytes(states, after, 0.0, 0.0)
    return max(in_pass, ending, key=lambda one: one.total)


def most_pass_tokens(model: TrainedModel, setup: TrainerSetup, memory_bytes: float) -> int:
    """Most tokens of a pass for which a GPU of that memory has room, in multiples of 1,024; 0: none."""

    def fits(thousands: int) -> bool:
        asked = replace(setup, pass_tokens=1024 * thousands)
        return trainer_bytes(model, asked).needed_memory_bytes <= memory_bytes

    least, most = 0, 1024
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return 1024 * least


def step_flops(model: TrainedModel, setup: TrainerSetup, tokens: float, squared_tokens: float) -> float:
    """Operations of one optimiser step on sequences with `tokens` in all, and the sum of their squared lengths.

    2 for each weight and token forward, as much again for the gradient of the activations, for that of the weights
    (those below an adapter have none) and where activations are computed again.
    """
    again = 1 if setup.recompute else 0
    linear = setup.passes * (2 + again + (0 if setup.lora_rank else 1)) + setup.forwards
    # Scores and values of half the square, and twice that backward.
    attention = setup.passes * (3 + again) + setup.forwards
    forward = 2 * model.parameters * tokens
    return linear * forward + attention * 2 * model.layers * model.queries * squared_tokens


def train_step_s(model: TrainedModel, setup: TrainerSetup, gpu: Gpu, tokens: float, squared_tokens: float) -> float:
    """Seconds of one optimiser step, at `PEAK_SHARE` of the peak of all GPUs."""
    flops_per_s = setup.ranks * gpu.flops_per_s * PEAK_SHARE
    return step_flops(model, setup, tokens, squared_tokens) / flops_per_s
