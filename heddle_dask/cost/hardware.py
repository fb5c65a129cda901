"""A cost formula: the terms of an engine iteration from the shapes of a model and a GPU.

The formula was fitted by hand to 16 public points (vLLM on H100, bf16: Qwen3 8B, 14B and 32B at TP 1
and 2; mean error 3 %, worst 9 %); `scripts.public_points` holds them. Mixtures of experts
and other GPUs use the same factors; no public point checks those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self

from heddle_dask.core.errors import BadInput

LAUNCH_S = 0.5e-3
"""Seconds of an iteration outside GPU kernels: scheduling, preparing inputs."""
LAYER_S = 20e-6
"""Seconds of a layer outside its large kernels: norms, rotations, gaps between kernels."""
SEQUENCE_S = 25e-6
"""Seconds per decoding sequence: sampling, detokenising, bookkeeping."""
PER_PROMPT_S = 2.9e-3
"""Seconds per prompt, most of them CPU time of the engine: fitted to bursts of prompts and prompts beside decoding
sequences on one H100 (benchmarks/gpu/2026-11-26); 3.2 ms where two engines shared the card."""
WEIGHT_READ_SHARE = 0.80
"""Share of the HBM bandwidth at which weights are read."""
KV_READ_SHARE = 0.85
"""Share of the HBM bandwidth at which attention reads KV."""
PEAK_SHARE = 0.70
"""Share of the dense peak that linear layers reach."""
MEMORY_SHARE = 0.88
"""Share of the GPU memory that an engine uses."""
WORKSPACE_BYTES_PER_GPU = 2e9
"""Activations, graphs and buffers of one GPU."""

DEGREES = (1, 2, 4, 8)
"""TP degrees inside a node of 8 GPUs."""


@dataclass(frozen=True, slots=True)
class _Shape:
    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            optional = field.default is not MISSING
            fine = isinstance(value, int | float) and not isinstance(value, bool)
            if not fine or not (0 < value < float("inf") or (optional and value == 0)):
                raise BadInput(f"{type(self).__name__} {field.name} is {value!r}: use a number above 0")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Read a shape from parsed JSON or TOML; an unknown or missing key is BadInput."""
        known = [field.name for field in fields(cls)]
        needed = {field.name for field in fields(cls) if field.default is MISSING}
        wrong = sorted((set(mapping) - set(known)) | (needed - set(mapping)))
        if wrong:
            verb = "lacks" if wrong[0] in known else "has unknown key"
            raise BadInput(f"{cls.__name__} {verb} {wrong[0]!r}: give {', '.join(known)}")
        return cls(**mapping)


@dataclass(frozen=True, slots=True)
class ModelShape(_Shape):
    """The properties of a transformer that determine its speed; an optional value of 0 is unknown (experts: none).

    Attributes
    ----------
    weight_bytes
        Bytes of all weights as loaded.
    kv_bytes_per_token
        Bytes of keys and values of one token over all layers, each KV head once.
    heads, kv_heads
        Attention heads and KV heads. They limit the TP degree; if there are fewer KV heads than GPUs, GPUs hold copies.
    active_parameters
        Weights that one token is multiplied with; 0: all.
    experts, experts_per_token
        Experts of each sparse layer, and experts that a token visits.
    expert_bytes
        Bytes of the weights of all experts, a part of `weight_bytes`.
    """

    parameters: float
    weight_bytes: float
    layers: int
    hidden_size: int
    kv_bytes_per_token: float
    heads: int = 0
    kv_heads: int = 0
    active_parameters: float = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_bytes: float = 0

    def __post_init__(self) -> None:
        super(ModelShape, self).__post_init__()
        for part, whole in (
            ("active_parameters", "parameters"),
            ("expert_bytes", "weight_bytes"),
            ("experts_per_token", "experts"),
            ("kv_heads", "heads"),
        ):
            if getattr(self, part) > getattr(self, whole):
                raise BadInput(f"ModelShape {part} is {getattr(self, part)!r}: use at most {whole}")

    @property
    def expert_share(self) -> float:
        """Share of a layer's experts that one token visits; 0 for a dense model."""
        return self.experts_per_token / self.experts if self.experts else 0.0

    def distinct_experts(self, tokens: int) -> float:
        """Expected number of experts of a layer that a batch of `tokens` tokens visits.

        A token visits `experts_per_token` of `experts`, all choices equally likely and independent between tokens: a
        token misses an expert with probability 1 - share. Real routers prefer some experts, and neighbouring tokens
        choose similar ones, so fewer are visited: this is an upper bound.
        """
        return self.experts * (1.0 - (1.0 - self.expert_share) ** tokens)

    def kv_copies(self, tp_degree: int) -> float:
        """Copies of each KV head in an engine of that degree."""
        return max(1.0, tp_degree / self.kv_heads) if self.kv_heads else 1.0


@dataclass(frozen=True, slots=True)
class Gpu(_Shape):
    """The properties of a GPU that determine an engine's speed; an optional value of 0 is unknown.

    Attributes
    ----------
    flops_per_s
        Dense peak in the weights' type.
    memory_bytes_per_s, memory_bytes
        HBM bandwidth and size.
    link_bytes_per_s
        All-reduce bandwidth between GPUs of one engine.
    peer_bytes_per_s
        NVLink to another GPU of the node, one direction, line rate.
    network_bytes_per_s
        Network between nodes per GPU, one direction, line rate.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    peer_bytes_per_s: float = 0
    network_bytes_per_s: float = 0


def all_reduce_s(tp_degree: int) -> float:
    """Seconds of one small all-reduce; 7, 9 and 12 microseconds at TP 2, 4 and 8."""
    if tp_degree == 1:
        return 0.0
    if tp_degree <= 2:
        return 7e-6
    return 9e-6 if tp_degree <= 4 else 12e-6


def iteration_terms(model: ModelShape, gpu: Gpu, tp_degree: int) -> dict[str, float]:
    """The terms of `heddle_dask.cost.iteration.EngineCost`, except the KV capacity.

    Raises
    ------
    BadInput
        The degree does not divide the model's heads.
    """
    check_degree(model, tp_degree)
    reduces = 2 * model.layers * all_reduce_s(tp_degree)
    multiplied = model.active_parameters or model.parameters
    token_s = 2 * multiplied / (tp_degree * PEAK_SHARE * gpu.flops_per_s)
    if tp_degree > 1:
        # Two all-reduces per layer, each of one hidden state with 2 bytes per element.
        token_s += 2 * model.layers * model.hidden_size * 2 / gpu.link_bytes_per_s
    weights_per_s = tp_degree * WEIGHT_READ_SHARE * gpu.memory_bytes_per_s
    kv_bytes = model.kv_bytes_per_token * model.kv_copies(tp_degree)
    return {
        "fixed_s": LAUNCH_S + model.layers * LAYER_S + reduces + model.weight_bytes / weights_per_s,
        "token_s": token_s,
        "prefill_token_s": token_s,
        "sequence_s": SEQUENCE_S,
        "context_token_s": kv_bytes / (tp_degree * KV_READ_SHARE * gpu.memory_bytes_per_s),
        "spared_s": model.expert_bytes / weights_per_s,
        "expert_share": model.expert_share,
        "per_prompt_s": PER_PROMPT_S,
    }


def check_degree(model: ModelShape, tp_degree: int) -> None:
    """Refuse a TP degree that cannot split the model's heads; unknown heads allow all."""
    if isinstance(tp_degree, bool) or not isinstance(tp_degree, int) or tp_degree < 1:
        raise BadInput(f"TP degree {tp_degree!r} is none: use a whole number of at least 1")
    if model.heads and model.heads % tp_degree:
        raise BadInput(
            f"TP degree {tp_degree} does not divide the model's {model.heads} attention heads: "
            f"use {_listed(allowed_degrees(model))}"
        )
    if model.kv_heads and model.kv_heads % tp_degree and tp_degree % model.kv_heads:
        raise BadInput(
            f"TP degree {tp_degree} splits the model's {model.kv_heads} KV heads unevenly: "
            f"use {_listed(allowed_degrees(model))}"
        )


def allowed_degrees(model: ModelShape, degrees: tuple[int, ...] = DEGREES) -> tuple[int, ...]:
    """Those of `degrees` that split the model's heads evenly."""
    return tuple(
        degree
        for degree in degrees
        if (not model.heads or model.heads % degree == 0)
        and (not model.kv_heads or model.kv_heads % degree == 0 or degree % model.kv_heads == 0)
    )


def kv_capacity_tokens(model: ModelShape, gpu: Gpu, tp_degree: int) -> int:
    """KV capacity beside the weights, in tokens; copies of KV heads take memory too."""
    tokens = _kv_room_tokens(model, gpu, tp_degree)
    if tokens < 1:
        raise BadInput(
            f"model of {model.weight_bytes / 1e9:.0f} GB does not fit on {tp_degree} GPUs of "
            f"{gpu.memory_bytes / 1e9:.0f} GB: use a larger TP degree"
        )
    return tokens


def _kv_room_tokens(model: ModelShape, gpu: Gpu, tp_degree: int) -> int:
    per_gpu_bytes = MEMORY_SHARE * gpu.memory_bytes - WORKSPACE_BYTES_PER_GPU
    room_bytes = per_gpu_bytes * tp_degree - model.weight_bytes
    return int(room_bytes // (model.kv_bytes_per_token * model.kv_copies(tp_degree)))


def _listed(degrees: tuple[int, ...]) -> str:
    return ", ".join(map(str, degrees)) if degrees else "1"


NVLINK_SHARE = 0.82
"""Share of the NVLink line rate that a transfer reaches: 370 of 450 GB/s on H100 (a maintainer in nccl-tests issue
212)."""
NETWORK_SHARE = 0.475
"""Share of the network line rate that a KV transfer reaches: 190 of 400 GB/s on 8 ports of 400 Gb/s (Mooncake Transfer
Engine, 40 GB of KV). With eight ports for one transfer and vLLM, 71 % were measured for long prompts; this is the
conservative value."""
SETUP_S = 0.066
"""Seconds of a migration outside its data transfer: handshake and one-token requests. Least squares over the nine mean
migration times of Heddle's Table 1 (three models, three workloads) with one slope per workload in KV bytes per token;
largest deviation 0.041 s. At 23.75 GB/s the slopes mean contexts of 28K, 15K and 25K tokens: below the 40K cap."""


def link_bytes_per_s(gpu: Gpu, *, same_node: bool) -> float:
    """Achieved bytes per second from one GPU to another."""
    line = gpu.peer_bytes_per_s if same_node else gpu.network_bytes_per_s
    if not line:
        name = "peer_bytes_per_s" if same_node else "network_bytes_per_s"
        raise BadInput(f"Gpu has no {name}: give it, transfers need it")
    return line * (NVLINK_SHARE if same_node else NETWORK_SHARE)


def transfer_s(
    tokens: int,
    model: ModelShape,
    gpu: Gpu,
    *,
    same_node: bool,
    source_degree: int = 1,
    target_degree: int = 1,
    setup_s: float = SETUP_S,
) -> float:
    """Seconds to move the KV of `tokens` tokens to another engine.

    Every GPU of an engine has its own link and sends or receives its KV heads, so the side with fewer GPUs limits the
    rate. Copies of a KV head are sent once and duplicated on the target. 0 tokens cost nothing.
    """
    for degree in (source_degree, target_degree):
        check_degree(model, degree)
    if tokens <= 0:
        return 0.0
    links = min(source_degree, target_degree, model.kv_heads or source_degree)
    return setup_s + tokens * model.kv_bytes_per_token / (links * link_bytes_per_s(gpu, same_node=same_node))
