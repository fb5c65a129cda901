"""Preload for tool workers::

    dask worker ADDRESS --resources TOOL=8 --nthreads 4096 --preload heddle_dask.preload.tool_worker

Registers the plugin that runs actions; a client that registers it again changes nothing.
"""

from __future__ import annotations

from distributed import Worker

from heddle_dask.live.worker.tool_worker import ToolWorker


async def dask_setup(worker: Worker) -> None:
    """Add the plugin when the worker has connected; it is announced on the worker's stream."""
    await worker.plugin_add(ToolWorker(), catch_errors=False)
