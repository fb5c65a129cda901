"""Seconds of a KV transfer between engines."""

from __future__ import annotations

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.hardware import Gpu, ModelShape, check_degree

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
    """Achieved bytes per second from one GPU to another.

    Raises
    ------
    BadInput
        The bandwidth of this link is unknown.
    """
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

    Raises
    ------
    BadInput
        A degree does not divide the heads, or the GPU's links are unknown.
    """
    for degree in (source_degree, target_degree):
        check_degree(model, degree)
    if tokens <= 0:
        return 0.0
    links = min(source_degree, target_degree, model.kv_heads or source_degree)
    return setup_s + tokens * model.kv_bytes_per_token / (links * link_bytes_per_s(gpu, same_node=same_node))
