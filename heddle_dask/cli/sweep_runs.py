"""Where the rollouts of a sweep run: in this process one by one, or each as a task of a Dask cluster.

Both return the rollouts in the order of the jobs, with the same figures. A line per finished rollout says how many are
done and about how long the rest takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.live.driver.runs.progress import duration
from heddle_dask.sim.rollout import SimulatedRollout
from heddle_dask.sim.sweep import SimulationJob, run_job, run_jobs

if TYPE_CHECKING:
    from distributed import Client

Say = Callable[[str], None]
T = TypeVar("T")
R = TypeVar("R")


def play_jobs(
    jobs: Sequence[SimulationJob],
    *,
    scheduler: str | None,
    say: Say,
    names: Sequence[str] | None = None,
) -> list[SimulatedRollout]:
    """The rollout of each job, in the order of the jobs.

    Parameters
    ----------
    scheduler
        Address of the Dask scheduler for the jobs; None: run them in this process. Every worker needs the same
        version of this package, and a trace file under the same path and with the same content.
    names
        Names of the jobs in these lines [default: the strategies].
    """
    progress = _Progress(names or [job.arm.name for job in jobs], say)
    if scheduler is None:
        collect_seldom()
        rollouts = []
        for number, rollout in enumerate(run_jobs(jobs)):
            progress.ended(number, rollout)
            rollouts.append(rollout)
        return rollouts
    # Pin each workload once: workers must read the same content as this process.
    pins = {workload: workload.pinned() for workload in dict.fromkeys(job.workload for job in jobs)}
    pinned = [replace(job, workload=pins[job.workload]) for job in jobs]
    return run_on_cluster(run_job, pinned, scheduler, say, progress.ended)


def run_on_cluster(
    function: Callable[[T], R],
    arguments: Sequence[T],
    scheduler: str,
    say: Say,
    ended: Callable[[int, R], None],
) -> list[R]:
    """Run `function` for each argument as a task of a Dask cluster; results in the order of the arguments.

    Parameters
    ----------
    ended
        Called with the number of an argument and its result as soon as its task ends.
    """
    return asyncio.run(_run_on_cluster(function, arguments, scheduler, say, ended))


class _Progress:
    """Counts finished rollouts, and estimates the time left from theirs."""

    def __init__(self, names: Sequence[str], say: Say) -> None:
        self.say = say
        self._names = names
        self._done = 0
        self._began_s = time.monotonic()

    def ended(self, number: int, one: SimulatedRollout) -> None:
        self._done += 1
        total = len(self._names)
        left = total - self._done
        left_s = (time.monotonic() - self._began_s) / self._done * left
        rest = f"; about {duration(left_s)} left" if left else ""
        self.say(
            f"{self._done}/{total}: {self._names[number]}, seed {one.seed}: {one.makespan_s:,.1f} s, "
            f"{one.bound_share:.1%} of the bound ({one.cpu_s:.1f} s of CPU){rest}"
        )


async def _run_on_cluster(
    function: Callable[[T], R],
    arguments: Sequence[T],
    address: str,
    say: Say,
    ended: Callable[[int, R], None],
) -> list[R]:
    # Imported here: Dask and the live package take seconds.
    from heddle_dask.cli.cluster_choice import CONNECT_TIMEOUT_S, remote_client

    async with remote_client(address, CONNECT_TIMEOUT_S) as client:
        resources = await _resources(client, len(arguments), address, say)
        futures = [client.submit(function, argument, pure=False, resources=resources) for argument in arguments]
        waits = [
            asyncio.ensure_future(_result(number, future, address, ended)) for number, future in enumerate(futures)
        ]
        try:
            return list(await asyncio.gather(*waits))
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


async def _result(number: int, future: Any, address: str, ended: Callable[[int, R], None]) -> R:
    from distributed import KilledWorker
    from distributed.client import FutureCancelledError

    try:
        result: R = await future
    except KilledWorker:
        raise BadInput(
            f"a simulation killed Dask workers at {address}: give them more memory, or simulate fewer trajectories"
        ) from None
    except FutureCancelledError as error:
        raise BadInput(f"the Dask scheduler at {address} dropped the sweep ({error.reason}): start it again") from None
    ended(number, result)
    return result


async def _resources(client: Client, jobs: int, address: str, say: Say) -> dict[str, float] | None:
    """Resources of a simulation on a worker: a CPU of the tool pool if the workers are tagged for rollouts.

    Workers of a rollout have thousands of threads: without the tag all simulations would start at once, beside the
    engines.
    """
    from heddle_dask.live.wire.messages import TOOL_RESOURCE

    scheduler: Any = client.scheduler
    workers = (await scheduler.identity(n_workers=-1))["workers"].values()
    tools = sum(worker["resources"].get(TOOL_RESOURCE, 0) for worker in workers)
    if tools:
        say(f"{jobs} simulations on {tools:.0f} tool CPUs of {len(workers)} workers at {address}")
        return {TOOL_RESOURCE: 1}
    threads = sum(worker["nthreads"] for worker in workers)
    waiting = "" if workers else ": waiting for the first worker"
    say(f"{jobs} simulations on {threads} threads of {len(workers)} workers at {address}{waiting}")
    return None
