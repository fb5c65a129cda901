"""Preload for rollout workers.

Without ``--model`` it only imports what steps need, so that the first step does not pay for it. With ``--model`` (in
``--preload-argv``) it starts the engine before any client comes::

    dask worker ADDRESS --resources ENGINE=1 --nthreads 4096 \
        --preload heddle_dask.preload.rollout_worker --model DIR --engine vllm --slots 16

Workers of one node take different GPUs by themselves; ``CUDA_VISIBLE_DEVICES`` of a worker says from which.
"""

from __future__ import annotations

import json
import os
from typing import Any

import click
from distributed import Worker

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.spec import DEFAULT_KIND, ENGINE_KINDS, EngineSpec, check_hardware, engine_kind
from heddle_dask.live.wire.messages import HARDWARE_VARIABLE
from heddle_dask.live.worker.engine_host import Watch
from heddle_dask.live.worker.rollout_worker import RolloutWorker


@click.command()
@click.option("--model", default=None, help="model directory; without it no engine is started here")
@click.option("--engine", default=DEFAULT_KIND, help=f"{', '.join(ENGINE_KINDS)} or package.module:object")
@click.option("--slots", default=None, type=click.IntRange(min=1), help="default: as the engine kind chooses")
@click.option("--max-model-len", default=None, type=click.IntRange(min=2), help="default: the model's limit")
@click.option("--tp-degree", default=1, type=click.IntRange(min=1))
@click.option("--engines-per-gpu", default=1, type=click.IntRange(min=1), help="engines that share each GPU")
@click.option("--kv-transfer", is_flag=True, help="engines transfer KV caches to one another")
@click.option("--hardware", default="", help="class of the GPUs, for affinity, such as H20")
@click.option("--start-timeout", default=600.0, type=click.FloatRange(min=1), help="seconds")
@click.option("--dtype", default="auto", help="type of the weights")
@click.option("--options", default="{}", help="JSON object with the kind's own options, as VllmOptions has them")
async def dask_setup(
    worker: Worker,
    model: str | None,
    engine: str,
    slots: int | None,
    max_model_len: int | None,
    tp_degree: int,
    engines_per_gpu: int,
    kv_transfer: bool,
    hardware: str,
    start_timeout: float,
    dtype: str,
    options: str,
) -> None:
    """Start supervising an engine when a model is named."""
    check_hardware("--hardware", hardware)
    if hardware:  # also for engines that a driver starts here
        os.environ[HARDWARE_VARIABLE] = hardware
    if model is None:
        return
    spec = EngineSpec(
        engine,
        model,
        slots,
        max_model_len,
        dtype=dtype,
        tp_degree=tp_degree,
        kv_transfer=kv_transfer,
        engines_per_gpu=engines_per_gpu,
        options=engine_kind(engine).options_type.from_mapping(_parsed(options)),
    )
    await worker.plugin_add(RolloutWorker(spec, Watch(start_timeout_s=start_timeout)), catch_errors=False)


def _parsed(options: str) -> dict[str, Any]:
    try:
        parsed = json.loads(options)
    except ValueError as error:
        raise BadInput(f"--options {options} is no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise BadInput(f"--options {options} is no JSON object: give names and values")
    return parsed
