"""Preload for workers of trainers::

    dask worker ADDRESS --resources TRAINER=1 --preload heddle_dask.preload.trainer_worker

The trainer uses the GPUs of ``CUDA_VISIBLE_DEVICES``, one for each of its ranks, and shares them with no engine.
``HEDDLE_TRAINER_THREADS`` is the number of CPU threads of each rank where the trainer's description names none [1].
"""

from __future__ import annotations

from distributed import Worker

from heddle_dask.live.worker.trainer_host import TrainerHost


async def dask_setup(worker: Worker) -> None:
    """Add the plugin when the worker has connected; the first client adds it again, before a trainer runs."""
    await worker.plugin_add(TrainerHost(), catch_errors=False)
