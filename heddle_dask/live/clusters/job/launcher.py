"""The main process of a job: starts its workers, and has them drained before the job ends.

The batch system's signals come here. SIGUSR1, SIGTERM and the clock all begin the drain: the scheduler moves away what
the workers hold, and then closes them. A batch system may send the signals to every process of a job. In the workers,
their nannies and engines they are blocked (`SupervisedProcess`, `shielded`) or ignored (`live.worker.shield`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from heddle_dask.engines.address import PORTS_VARIABLE
from heddle_dask.engines.gpus import named_gpus
from heddle_dask.engines.supervised_process import SupervisedProcess
from heddle_dask.engines.watchdog import SHIELDED_VARIABLE
from heddle_dask.live.clusters.job.batch_job import JOB_VARIABLE, job_memory_bytes, seconds_to_end, warns_early
from heddle_dask.live.clusters.job.options import GPUS_VARIABLE, JobOptions, gpu_slices
from heddle_dask.live.clusters.job.scheduler_link import SchedulerLink
from heddle_dask.live.clusters.job.scratch import job_scratch
from heddle_dask.live.clusters.worker_command import QUICK_LOOP, worker_arguments
from heddle_dask.live.wire.messages import (
    ENGINE_LOGS_VARIABLE,
    MEMORY_VARIABLE,
    NODE_VARIABLE,
    TRAINER_THREADS_VARIABLE,
)
from heddle_dask.live.worker import shield as shield_preload

# At the end of the job's time so much is left for ending the workers and removing the scratch.
LAST_S = 5.0
_GRACE_S = 4.0
# Without a scheduler workers end by themselves.
_DEATH_TIMEOUT_S = 60
_AGAIN_S = 2.0
_CLOSING_S = 15.0


async def run_job(options: JobOptions, environ: Mapping[str, str]) -> int:
    """Host the workers until they have ended or the job ends; returns the exit code.

    0: the workers were drained, or were closed by the scheduler. 1: they ended by themselves.

    Raises
    ------
    BadInput
        The job cannot start; nothing was started.
    """
    options.check()
    slices = gpu_slices(options, environ)
    link = SchedulerLink(options)
    host = await link.worker_host()
    left_s = await asyncio.to_thread(seconds_to_end, options.ends_in_s, environ, time.time())
    with job_scratch(options.scratch) as scratch:
        job = RunningJob(options, link, scratch, left_s)
        workers = [
            _worker(options, name, host, gpus, scratch, environ)
            for name, gpus in zip(options.worker_names, slices, strict=True)
        ]
        return await job.host(workers)


def _worker(
    options: JobOptions,
    name: str,
    host: str,
    gpus: str | None,
    scratch: Path,
    environ: Mapping[str, str],
) -> SupervisedProcess:
    logs = scratch if options.logs is None else options.logs.absolute()
    encrypted = ["--protocol", "tcp"] if options.tls is None else ["--protocol", "tls", *options.tls.options]
    connection = [*encrypted, "--host", host, *options.port_options, "--death-timeout", str(_DEATH_TIMEOUT_S)]
    shield = [part for option in ("--preload", "--preload-nanny") for part in (option, shield_preload.__name__)]
    env = {
        **QUICK_LOOP,
        "DASK_TEMPORARY_DIRECTORY": str(scratch),
        SHIELDED_VARIABLE: "1",
        ENGINE_LOGS_VARIABLE: str(logs / name),
    }
    if options.role == "tool" and (memory_bytes := job_memory_bytes(environ)):
        env[MEMORY_VARIABLE] = str(memory_bytes // options.workers)
    if options.role == "trainer":
        env[TRAINER_THREADS_VARIABLE] = environ.get(TRAINER_THREADS_VARIABLE, str(options.cpus))
    if options.worker_ports is not None:
        env[PORTS_VARIABLE] = "{}:{}".format(*options.worker_ports)
    if gpus is not None:
        env[GPUS_VARIABLE] = gpus
    if named_gpus(environ):
        # Jobs on one node have different GPUs, which may carry the same numbers.
        env[NODE_VARIABLE] = f"{os.uname().nodename}/{environ.get(JOB_VARIABLE) or os.getpid()}"
    argv = [sys.executable, "-m", "dask"]
    argv += worker_arguments(options.address, name, options.resources, scratch, connection)
    argv += shield
    return SupervisedProcess(argv, logs, name, env=env, records=scratch, grace_s=_GRACE_S, shielded=True)


class RunningJob:
    """One job from the start of its workers to their end.

    Parameters
    ----------
    left_s
        Seconds until the job ends; None when nothing tells.
    """

    def __init__(self, options: JobOptions, link: SchedulerLink, scratch: Path, left_s: float | None) -> None:
        self._options = options
        self._link = link
        self._scratch = scratch
        self._ends_s = None if left_s is None else time.monotonic() + left_s
        self._deadline_s = float("inf")
        self._drain = asyncio.Event()
        self._reason = ""

    async def host(self, workers: list[SupervisedProcess]) -> int:
        """Start the workers and stay until they have ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        timer = None
        if self._ends_s is not None:
            begins_s = self._ends_s - self._options.drain_s - time.monotonic()
            timer = loop.call_later(max(0.0, begins_s), self.begin_drain, "its time is over soon")
        draining: asyncio.Task[None] | None = None
        try:
            for worker in workers:
                worker.launch()
            self._say(f"{len(workers)} workers started; {self._told_end()}")
            ended = asyncio.ensure_future(self._all_ended(workers))
            asked = asyncio.ensure_future(self._drain.wait())
            await asyncio.wait([ended, asked], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                draining = asyncio.ensure_future(self._have_drained())
                await self._ended_in_time(ended)
            asked.cancel()
            ended.cancel()
            return self._exit_code(workers)
        finally:
            if timer is not None:
                timer.cancel()
            if draining is not None:
                draining.cancel()
            await asyncio.gather(*(worker.stop() for worker in workers))
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _signalled(self, number: signal.Signals) -> None:
        # SIGUSR1 comes so many seconds before the end as the job script asks for; SIGTERM when the job is cancelled or
        # preempted, and SIGKILL follows.
        longest_s = self._options.drain_s
        if number != signal.SIGUSR1:
            longest_s = min(longest_s, self._options.kill_wait_s)
        elif self._ends_s is not None and warns_early(self._ends_s - time.monotonic(), longest_s):
            self._say(f"{number.name} came early: it drains {longest_s:g} s before its end")
            return
        self.begin_drain(f"it got {number.name}", longest_s)

    def begin_drain(self, reason: str, longest_s: float | None = None) -> None:
        now_s = time.monotonic()
        ends_s = float("inf") if self._ends_s is None else self._ends_s
        if longest_s is not None:
            ends_s = min(ends_s, now_s + longest_s)
        self._deadline_s = min(self._deadline_s, max(now_s, ends_s - LAST_S))
        self._reason = reason
        self._drain.set()

    async def _have_drained(self) -> None:
        """Ask the scheduler to drain the workers, and again when there is less time."""
        asked_s = float("inf")
        request: asyncio.Task[None] | None = None
        try:
            while True:
                if self._deadline_s < asked_s:
                    asked_s = self._deadline_s
                    if request is not None:
                        request.cancel()
                    self._say(f"drains, since {self._reason}; {max(0.0, asked_s - time.monotonic()):.0f} s are left")
                    request = asyncio.ensure_future(self._ask())
                self._drain.clear()
                await self._drain.wait()
        finally:
            if request is not None:
                request.cancel()

    async def _ask(self) -> None:
        while True:
            try:
                answer = await self._link.drain(
                    self._options.worker_names, max(0.0, self._deadline_s - time.monotonic())
                )
                if answer.late:
                    self._say(f"{', '.join(answer.late)} had work left at the end")
                # They close by themselves; one that had not joined yet is not needed any more.
                self._deadline_s = min(self._deadline_s + LAST_S - 1.0, time.monotonic() + _CLOSING_S)
                return
            except OSError as error:
                # The scheduler is gone, and the workers end with it; or a message was lost.
                self._say(f"the scheduler does not answer: {error}")
                await asyncio.sleep(_AGAIN_S)
            except RuntimeError as error:
                self._say(str(error))
                return

    async def _ended_in_time(self, ended: asyncio.Future[None]) -> None:
        while not ended.done() and (left_s := self._deadline_s - time.monotonic()) > 0:
            # The deadline may come nearer meanwhile.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(ended), min(left_s, 1.0))

    async def _all_ended(self, workers: list[SupervisedProcess]) -> None:
        await asyncio.gather(*(worker.wait() for worker in workers))

    def _exit_code(self, workers: list[SupervisedProcess]) -> int:
        if self._reason:
            left = [worker.name for worker in workers if worker.returncode is None]
            self._say(f"{', '.join(left)} did not leave in time" if left else "drained")
            return 0
        failed = [worker for worker in workers if worker.returncode]
        for worker in failed:
            last = " | ".join(worker.log_tail(3))
            self._say(f"worker {worker.name} ended with exit code {worker.returncode}: {last}")
        return 1 if failed else 0

    def _told_end(self) -> str:
        if self._ends_s is None:
            return "the end of the job is not known: it drains at SIGUSR1 or SIGTERM"
        return f"the job ends in {self._ends_s - time.monotonic():.0f} s"

    def _say(self, line: str) -> None:
        print(f"heddle job {self._options.name}: {line}", flush=True)
