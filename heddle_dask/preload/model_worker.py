"""Preload for workers of model services::

    dask worker ADDRESS --resources MODEL=4 --preload heddle_dask.preload.model_worker

``MODEL`` is the number of GPUs; the worker uses those of ``CUDA_VISIBLE_DEVICES`` and shares them with no engine. On a
machine without GPUs, it is the number of memory slots, of ``MODEL_SLOT_BYTES`` bytes each. ``MODELS_PER_GPU`` copies
are resident on one GPU at a time [1]; ``MODEL_COPY_BYTES`` bytes of host memory hold copies [no limit].
"""

from __future__ import annotations

from distributed import Worker

from heddle_dask.live.worker.service_worker import ServiceWorker


async def dask_setup(worker: Worker) -> None:
    """Add the plugin when the worker has connected; it is announced on the worker's stream."""
    await worker.plugin_add(ServiceWorker(), catch_errors=False)
