"""What it costs to move a context's KV between engines, and to give an engine another TP degree."""

from __future__ import annotations

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.hardware import Gpu, ModelShape, check_degree

NVLINK_SHARE = 0.82
"""NVLink line rate that a transfer reaches: 370 of 450 GB/s on H100 (nccl-tests issue 212, answer of a maintainer)."""
NETWORK_SHARE = 0.475
"""Network line rate that a KV transfer reaches: 190 of 400 GB/s on 8 ports of 400 Gb/s (Mooncake Transfer Engine,
40 GB of KV). With eight ports for one transfer and vLLM, 71 % were seen for long prompts; this is the careful value."""
SETUP_S = 0.066
"""Seconds of a migration beside its bytes: agreeing, handshake, one-token requests. Least squares over the nine mean
migration times of Heddle's Table 1 (three models, three workloads) with one slope per workload in KV bytes per token;
largest deviation 0.041 s. At 23.75 GB/s the slopes mean contexts of 28K, 15K and 25K tokens: below the 40K cap."""
START_S = 58.0
"""Seconds until a new vLLM process answers, weights aside: 59 s seen with compiled graphs in the cache (vLLM issue
20264: 7.5 s of tracing, 17 s of graph capture, the rest process start and imports), 0.9 s of them to load weights."""
LOAD_BYTES_PER_S = 7e9
"""Weights from the page cache to the GPUs of an engine: 70 GB in about 10 s at TP 8 (vLLM issue 19824)."""


def link_bytes_per_s(gpu: Gpu, *, same_node: bool) -> float:
    """Bytes per second that one GPU really sends to another one.

    Raises
    ------
    BadInput
        The GPU's figures do not say.
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

    Every GPU of an engine has a link of its own and sends or takes its KV heads, so that the side with fewer of them
    decides; copies of a KV head are sent once and made on the target. 0 tokens cost nothing.

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


def restart_s(
    model: ModelShape, *, start_s: float = START_S, load_bytes_per_s: float = LOAD_BYTES_PER_S
) -> float:
    """Seconds without an engine when it is ended and started again at another TP degree: an assumption.

    The defaults are single observations of others (see the constants), not measured here. A measured table says how
    long its engine took to start (`MeasuredTable.start_s`): give that, with `load_bytes_per_s` infinite.
    """
    return start_s + model.weight_bytes / load_bytes_per_s


def reshard_s(
    model: ModelShape, gpu: Gpu, source_degree: int, target_degree: int, *, setup_s: float = 1.0
) -> float:
    """Seconds to give running engines of one node another TP degree without a new process: an assumption.

    Each GPU of the target needs its share of the weights, from its peers over NVLink: at most
    ``weight_bytes / min(degrees)`` leave or reach one GPU. `setup_s` stands for rebuilt communicators and graphs kept
    from an earlier capture; no engine that runs unforked can do this today, so `restart_s` is what live runs pay.

    Raises
    ------
    BadInput
        A degree does not divide the heads, or the GPU's links are unknown.
    """
    for degree in (source_degree, target_degree):
        check_degree(model, degree)
    if source_degree == target_degree:
        return 0.0
    share_bytes = model.weight_bytes / min(source_degree, target_degree)
    return setup_s + share_bytes / link_bytes_per_s(gpu, same_node=True)
