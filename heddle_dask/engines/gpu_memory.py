"""What a model takes of a GPU's memory, told by its configuration before an engine has started.

Engines that share a GPU must not measure its memory while they start: each would count what the others take meanwhile.
Their KV cache is therefore stated, from what the weights leave of each engine's share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.gpus import InstalledGpu
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.vllm_command import argument_of, memory_share, vllm_options

_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes on each GPU of an engine."""

    weight_bytes: int
    workspace_bytes: int  # activations, graphs and buffers
    kv_token_bytes: int  # of one token of context


def model_memory(model: str, dtype: str = "auto", tp_degree: int = 1) -> ModelMemory:
    """The memory of a model directory at a type and TP degree; ``auto`` casts float32 to a half type, as vLLM does.

    Raises
    ------
    BadInput
        It is no directory, or its architecture is not known here.
    """
    # They need numpy, which commands that start no engine do without.
    from heddle_dask.cost.hardware import WORKSPACE_BYTES_PER_GPU
    from heddle_dask.cost.model_config import read_config, shape_of_config

    if not Path(model).is_dir():
        raise BadInput(f"{model} is no directory with a config.json")
    type_of = "float32" if dtype in ("float", "float32") else "bfloat16"
    shape = shape_of_config({**read_config(model), "torch_dtype": type_of}, f"{model}/config.json")
    kv_bytes = shape.kv_bytes_per_token * shape.kv_copies(tp_degree)
    return ModelMemory(
        int(shape.weight_bytes / tp_degree), int(WORKSPACE_BYTES_PER_GPU), max(1, int(kv_bytes / tp_degree))
    )


def with_own_share(spec: EngineSpec, installed: Sequence[InstalledGpu] | None) -> EngineSpec:
    """A vLLM engine with its part of the GPUs' memory: where it shares them, with a stated KV cache.

    Raises
    ------
    BadInput
        The model does not fit into that part, or nothing here tells whether it does and no KV cache is given.
    """
    options = vllm_options(spec.options)
    share = memory_share(spec)
    if options.kv_cache_gib is not None or argument_of(options.extra_args, "kv-cache-memory-bytes") is not None:
        return spec
    card_bytes = smallest_card_bytes(spec.devices, installed or ())
    try:
        if not card_bytes:
            raise BadInput("nvidia-smi does not say how much memory the GPUs have")
        if options.quantization is not None:
            raise BadInput("quantised weights are not counted")
        memory = model_memory(spec.model, spec.dtype, spec.tp_degree)
    except BadInput as error:
        if spec.engines_per_gpu == 1:
            return spec  # vLLM measures
        raise BadInput(
            f"{spec.engines_per_gpu} engines on a GPU need the size of their KV cache, which does not follow from the "
            f"model here ({error}): give kv_cache_gib (--kv-cache-gib)"
        ) from None
    free_bytes = int(share * card_bytes) - memory.weight_bytes - memory.workspace_bytes
    tokens = free_bytes // memory.kv_token_bytes
    needed = 1
    if argument_of(options.extra_args, "kv-cache-dtype") is None:
        needed = spec.max_model_len or 1
    is_smaller = any("offload" in argument for argument in options.extra_args)
    if tokens < needed and not is_smaller:
        raise _does_not_fit(spec, share * card_bytes, card_bytes, memory, int(max(0, tokens)))
    if spec.engines_per_gpu == 1 or is_smaller:
        return spec
    kv_bytes = free_bytes // _MIB * _MIB
    return replace(spec, options=replace(options, kv_cache_gib=kv_bytes / _GIB))


def smallest_card_bytes(devices: Sequence[str], installed: Sequence[InstalledGpu]) -> int:
    """Memory of the smallest of the named GPUs, of all where the names are not their numbers; 0: not known."""
    named = [gpu for gpu in installed if gpu.index in devices] or installed
    return min((gpu.memory_mib for gpu in named), default=0) * _MIB


def _does_not_fit(spec: EngineSpec, share_bytes: float, card_bytes: int, memory: ModelMemory, tokens: int) -> BadInput:
    def gib(size: float) -> str:
        return f"{size / _GIB:.1f} GiB"

    wanted = f"a context of {spec.max_model_len} tokens" if spec.max_model_len else "any context"
    engines = f"{spec.engines_per_gpu} engines" if spec.engines_per_gpu > 1 else "an engine"
    cure = "fewer engines per GPU, " if spec.engines_per_gpu > 1 else ""
    return BadInput(
        f"{engines} of {Path(spec.model).name} on a GPU of {gib(card_bytes)} with {gib(share_bytes)} each: weights "
        f"take {gib(memory.weight_bytes)}, graphs and buffers {gib(memory.workspace_bytes)}, which leaves {tokens} "
        f"tokens of KV and not {wanted}: use {cure}a larger TP degree, or shorter contexts (--max-context-tokens)"
    )
