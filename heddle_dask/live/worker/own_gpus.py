"""The GPUs that a worker has for its trainer or its model services: asked of the scheduler, which seats all askers."""

from __future__ import annotations

import asyncio
import os
import socket

from distributed import Worker

from heddle_dask.engines.gpus import present_gpus
from heddle_dask.live.wire.messages import NODE_VARIABLE
from heddle_dask.live.wire.transport import ask_over, send
from heddle_dask.live.wire.worker_messages import GpuHolder, GpusReturnedReport, TakeGpus


def node_name() -> str:
    """The machine, or the job, whose workers share GPUs."""
    return os.environ.get(NODE_VARIABLE) or socket.gethostname()


class OwnGpus:
    """Those of one worker, for one purpose."""

    def __init__(self, worker: Worker, holder: GpuHolder) -> None:
        self._worker = worker
        self._holder = holder
        self._names: tuple[str, ...] = ()

    async def take(self, count: int) -> tuple[str, ...]:
        """So many, the same as long as their number is; none on a machine without GPUs.

        Raises
        ------
        BadInput
            Too few are free.
        """
        if len(self._names) == count:
            return self._names
        visible = await asyncio.to_thread(present_gpus, os.environ)
        if not visible:
            return ()
        request = TakeGpus(self._worker.address, str(self._worker.name), node_name(), visible, count, self._holder)
        self._names = (await ask_over(self._worker.scheduler, request)).gpus
        return self._names

    def give_back(self) -> None:
        """Nothing runs on them any more."""
        if self._names:
            self._names = ()
            send(self._worker, GpusReturnedReport(self._holder))
