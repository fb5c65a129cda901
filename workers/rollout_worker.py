"""Preload for rollout workers.

Without ``--model`` it only imports what steps need, so that the first step does not pay for it. With ``--model`` (in
``--preload-argv``) it starts the engine before any client comes::

    dask worker ADDRESS --resources ENGINE=1 --nthreads 4096 \
        --preload workers.rollout_worker --model DIR --engine vllm --slots 16
"""

from __future__ import annotations

import click
from distributed import Worker

from heddle_dask.engines.kinds import ENGINE_KINDS
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.live.worker.rollout_worker import RolloutWorker


@click.command()
@click.option("--model", default=None, help="model directory; without it no engine is started here")
@click.option("--engine", default="vllm", help=f"{', '.join(ENGINE_KINDS)} or package.module:object")
@click.option("--slots", default=None, type=click.IntRange(min=1), help="default: as the engine kind chooses")
@click.option("--max-model-len", default=None, type=click.IntRange(min=2), help="default: the model's limit")
@click.option("--tp-degree", default=1, type=click.IntRange(min=1))
async def dask_setup(
    worker: Worker,
    model: str | None,
    engine: str,
    slots: int | None,
    max_model_len: int | None,
    tp_degree: int,
) -> None:
    """Start supervising an engine when a model is named."""
    if model is not None:
        spec = EngineSpec(engine, model, slots, max_model_len, tp_degree=tp_degree)
        await worker.plugin_add(RolloutWorker(spec), catch_errors=False)
