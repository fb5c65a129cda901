"""Waits for engines and tool workers, for a limited time, and says which are missing."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from distributed import Client

from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import EngineDescription
from heddle_dask.live.driver.options import Patience
from heddle_dask.live.wire.cluster_messages import in_jobs
from heddle_dask.live.wire.driver_messages import Capacity, GetCapacity
from heddle_dask.live.wire.messages import ENGINE_RESOURCE, TOOL_RESOURCE
from heddle_dask.live.wire.transport import ask_scheduler

_POLL_S = 0.2


class WaitClock:
    """Seconds of a wait, without those in which the missing workers were in jobs that queue or start.

    The batch system says how long a job queues, and the cluster object how long its start may take.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._asked_s = time.monotonic()

    def waited_s(self, for_jobs: bool) -> float:
        """Seconds so far; `for_jobs`: those since the last call do not count."""
        now_s = time.monotonic()
        self._waited_s += 0.0 if for_jobs else now_s - self._asked_s
        self._asked_s = now_s
        return self._waited_s


async def wait_for_capacity(
    client: Client,
    engines: int | None,
    patience: Patience,
    on_wait: Callable[[str], None] = lambda message: None,
    *,
    others_s: float = math.inf,
) -> Capacity:
    """Wait until the cluster can run steps and actions.

    Parameters
    ----------
    engines
        How many engines must answer; None: one on every worker that is tagged for it.
    on_wait
        Takes a line for each thing that is waited for, once.
    others_s
        Seconds for the other engines once one answers; then those that are there are enough.

    Raises
    ------
    BadInput
        No worker carries the tags in time, an engine does not start (with its reason), or engines take longer
        than `patience` allows.
    """
    clock = WaitClock()
    told = ""
    begins_s = math.inf
    while True:
        capacity = await ask_scheduler(client, GetCapacity())
        jobs = jobs_waited_for(capacity, engines)
        waited_s = clock.waited_s(bool(jobs))
        missing = missing_workers(capacity, engines)
        if missing:
            if waited_s > patience.workers_s:
                raise BadInput(f"{missing}; waited {waited_s:.0f} s")
            missing = jobs or missing
        else:
            wanted = engines or capacity.queued.engines_to_begin or capacity.engine_workers
            ready = len(capacity.engines)
            if ready >= wanted:
                return capacity
            if ready:
                begins_s = min(begins_s, time.monotonic() + others_s)
                if time.monotonic() >= begins_s:
                    on_wait(f"beginning with {ready} of {wanted} engines; the others join when they answer")
                    return capacity
            if capacity.start_failures:
                failure, possible = failed_start(capacity, engines)
                if ready >= (engines or possible):
                    on_wait(f"{failure}; going on with {ready} engines")
                    return capacity
            if waited_s > patience.engines_s:
                raise BadInput(f"{ready} of {wanted} engines answer after {waited_s:.0f} s; see their logs")
            missing = jobs or f"{ready} of {wanted} engines ready{starting_told(capacity.starting)}"
        if missing != told:
            told = missing
            on_wait(missing)
        await asyncio.sleep(_POLL_S)


def failed_start(capacity: Capacity, engines: int | None) -> tuple[str, int]:
    """One line about an engine that does not start, which is refused where too few are left, and how many are."""
    address, reason = next(iter(capacity.start_failures.items()))
    failure = f"an engine does not start on worker {address}: {reason}"
    possible = capacity.engine_workers - len(capacity.start_failures)
    if possible < (engines or 1):
        raise BadInput(failure)
    return failure, possible


def starting_told(phases: Sequence[str]) -> str:
    """What the engines that start are doing, in brackets; empty without any."""
    counts = {phase: phases.count(phase) for phase in sorted(phases)}
    told = ", ".join(phase if len(phases) == 1 else f"{count} {phase}" for phase, count in counts.items())
    return f" ({told})" if told else ""


def weaker_isolation(capacity: Capacity) -> str:
    """One line about tool workers that keep actions less apart than these ask for; empty: all do."""
    told: dict[str, list[str]] = {}
    for host, _, weaker in capacity.isolation:
        if weaker:
            told.setdefault(weaker, []).append(host.partition("/")[0])
    return "; ".join(f"{', '.join(sorted(hosts))}: {weaker}" for weaker, hosts in told.items())


def check_context(asked: int | None, engine_takes: int | None) -> None:
    """Refuse contexts longer than an engine takes: steps beyond would fail. None: not named."""
    if asked is not None and engine_takes is not None and asked > engine_takes:
        raise BadInput(
            f"max_context_tokens is {asked}, and an engine takes {engine_takes}: use at most that, or engines with a "
            "longer max_model_len"
        )


def longest_context(asked: int | None, engines: Sequence[EngineDescription], before: int | None) -> int:
    """Tokens of a context that every engine takes: as asked for, else the most.

    Parameters
    ----------
    before
        What the engines took that answered before; holds as long as none answers. None: at least one answers.

    Raises
    ------
    BadInput
        More was asked for.
    """
    most = min(engine.max_context_tokens for engine in engines) if engines or before is None else before
    check_context(asked, most)
    return most if asked is None else asked


def jobs_waited_for(capacity: Capacity, engines: int | None) -> str:
    """One line that says which of the missing workers are in jobs that wait or start; empty: none of them is."""
    jobs, told = capacity.queued, []
    wanted = engines or jobs.engines_to_begin or 1
    if capacity.engine_workers < wanted and jobs.engines + jobs.starting_engines:
        told.append(f"{capacity.engine_workers} of {wanted} rollout workers are there; {jobs.engines_told}")
    if capacity.tool_workers < 1 and jobs.tool_workers + jobs.starting_tool_workers:
        told.append(f"no tool worker is there; {in_jobs(jobs.tool_workers, jobs.starting_tool_workers)}")
    return "; ".join(told)


def missing_workers(capacity: Capacity, engines: int | None) -> str:
    """One line that says which workers are missing and what brings them; empty when there are enough."""
    if capacity.engine_workers < (engines or 1):
        lacks = f"{capacity.engine_workers} of {engines or 1} worker(s) that can host the model"
        role, tag = "rollout", f"{ENGINE_RESOURCE}=1"
    elif capacity.tool_workers < 1:
        lacks, role, tag = "no worker for tool calls", "tool", f"{TOOL_RESOURCE}=<cpus>"
    else:
        return ""
    if not capacity.queued.engines_to_begin:
        advice = f"start workers with --resources {tag}"
    elif capacity.queued.trouble:
        advice = f"latest failed job: {capacity.queued.trouble}"
    else:
        advice = f"the cluster file needs a group with role = {role!r}, and jobs of it: none is queued"
    return f"the cluster has {lacks} ({capacity.workers} workers in all): {advice}"


def hardware_of(engines: Sequence[EngineDescription]) -> dict[str, int]:
    """Number of engines of each class of hardware; empty where none is declared."""
    classes = [engine.hardware for engine in engines if engine.hardware]
    return {name: classes.count(name) for name in dict.fromkeys(classes)}
