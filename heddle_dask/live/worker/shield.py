"""Preload of workers and nannies in a job: SIGTERM is for the job's main process, which then ends them in order.

A batch system may send it to every process of a job. It cannot stay blocked here, as it is in the processes around
(`engines.supervised_process`): multiprocessing, by which a nanny starts its worker, unblocks it.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


async def dask_setup(server: Any) -> None:
    """Replace the handler of SIGTERM; the programs that this process starts have the default one."""
    signal.signal(signal.SIGTERM, _leave_to_job)


def _leave_to_job(_number: int, _frame: FrameType | None) -> None:
    """The job's main process has got it too."""
