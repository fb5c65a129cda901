"""What an engine is believed to cost by the GPUs that it runs on, as long as nothing is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.gpus import InstalledGpu, named_gpus
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.vllm_command import vllm_options

if TYPE_CHECKING:
    # It needs numpy, which commands that start no engine do without.
    from heddle_dask.cost.engine_cost import EngineCost


def cost_by_card(spec: EngineSpec, installed: Sequence[InstalledGpu], environ: Mapping[str, str]) -> EngineCost | None:
    """The cost of a vLLM engine by the published formula, times the engines that share its GPUs.

    None where the formula does not hold: GPUs without published figures, of several sorts or divided (MIG), a model of
    unknown shape, quantised weights, or weights of 32 bits.
    """
    from heddle_dask.cost.hardware import iteration_terms
    from heddle_dask.cost.iteration import EngineCost
    from heddle_dask.cost.model_config import shape_of_config
    from heddle_dask.cost.published import config_of, gpu_called

    devices = spec.devices or named_gpus(environ) or ()
    names = {gpu.name for gpu in [gpu for gpu in installed if gpu.index in devices] or installed}
    gpu = gpu_called(names.pop()) if len(names) == 1 else None
    is_half = spec.dtype not in ("float", "float32") and vllm_options(spec.options).quantization is None
    if gpu is None or not is_half or any(name.startswith("MIG-") for name in devices):
        return None
    try:
        # A name on a hub, as Qwen/Qwen3-8B, has its owner before it.
        config = config_of(spec.model if Path(spec.model).is_dir() else spec.model.rpartition("/")[2])
        terms = iteration_terms(shape_of_config({**config, "torch_dtype": "bfloat16"}), gpu, spec.tp_degree)
    except BadInput:
        return None
    return EngineCost(**terms).scaled(spec.engines_per_gpu)  # type: ignore[arg-type]
