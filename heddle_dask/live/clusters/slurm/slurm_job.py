"""One SLURM job of a group, on dask-jobqueue's job class.

Import this module only where SLURM is used: dask-jobqueue takes a moment to load.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from distributed.deploy.spec import ProcessInterface

from heddle_dask.live.clusters.slurm.jobs import ScriptOf
from heddle_dask.live.clusters.slurm.queue import SlurmFailed, SlurmQueue
from heddle_dask.live.clusters.slurm.worker_group import WorkerGroup


@contextlib.contextmanager
def no_signal_handlers() -> Iterator[None]:
    """Signal handlers that this thread sets meanwhile are not set.

    dask-jobqueue 0.9 replaces the handler of SIGINT when it is imported, which fails in any thread but the main one
    (a notebook's event loop, a synchronous cluster), and takes Ctrl-C from the program otherwise.
    """
    set_handler, thread = signal.signal, threading.get_ident()

    def ignored(number: int, handler: Any) -> Any:
        if threading.get_ident() == thread:
            return signal.getsignal(number)
        return set_handler(number, handler)

    signal.signal = ignored  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = set_handler


with no_signal_handlers():
    from dask_jobqueue.slurm import SLURMJob


class SlurmGroupJob(SLURMJob):
    """One job of a group, submitted with the script of this project in place of dask-jobqueue's."""

    def __init__(
        self,
        # `scheduler`, `name`: given by `SpecCluster`: the scheduler's address and the name of the job.
        scheduler: str,
        name: str,
        *,
        group: WorkerGroup,
        script: ScriptOf,  # writes its script
        queue: SlurmQueue,  # submits and cancels it
    ) -> None:
        super().__init__(
            scheduler,
            name,
            queue=group.partition,
            account=group.account,
            job_name=name,
            cores=group.cpus,
            # It writes a script of its own of these, which is not used; it cannot do without a memory.
            memory=f"{group.memory_bytes or 1024}B",
            processes=1,
        )
        self.refused = ""  # why it could not be submitted; empty: it was
        self._script = script(group, name, scheduler)
        self._queue = queue

    def job_script(self) -> str:
        return self._script

    async def start(self) -> None:
        """Submit it. A refusal is kept: the cluster decides when the next one is submitted."""
        try:
            self.job_id = await self._queue.submit(self._script)
        except SlurmFailed as error:
            self.refused = str(error)
        # Dask's own start would submit it in its own way.
        await ProcessInterface.start(self)

    def forget(self) -> None:
        """It was cancelled with others, or has ended: closing it needs no command."""
        self.job_id = None

    async def close(self) -> None:
        if self.job_id is not None:
            await self._queue.cancel([self.job_id])
            self.job_id = None
        await ProcessInterface.close(self)
