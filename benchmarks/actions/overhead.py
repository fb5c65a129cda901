"""Overhead of an action on the live CPU pool: allocation of cores, affinity, release; and actions per second.

A real cluster with one tool worker. The overhead *at the worker* is the time from the arrival of an action to its end,
less the time of its function: cores are taken, its process gets them and its limits, the value is pickled, and cores
and scratch directory are given back. The overhead *of the call* is the time of ``ctx.call`` less that of the function:
also controller, Dask and messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.emulated_rollouts import emulated, rolled_out
from heddle_dask.environments.base import Context, Task
from heddle_dask.isolation.cores import own_cores

CEILING_S = 8.0


@dataclass(frozen=True, slots=True)
class ActionOverheadRow:
    """One row: actions of one kind.

    Attributes
    ----------
    cpus, at_once
        CPUs that the tool worker declares, and trajectories that call at the same time.
    run_s
        Mean seconds of the function.
    worker_ms_p50, worker_ms_p99, call_ms_p50, call_ms_p99
        Overhead in milliseconds, at the worker and of the call.
    overhead_share
        Mean overhead of a call over the mean time of the function.
    actions_per_s
        Finished actions in the middle half of the time.
    """

    arm: str
    cpus: int
    at_once: int
    actions: int
    run_s: float
    worker_ms_p50: float
    worker_ms_p99: float
    call_ms_p50: float
    call_ms_p99: float
    overhead_share: float
    actions_per_s: float


def timed_sleep(seconds: float) -> float:
    """A plain function that takes `seconds`; returns how long it took."""
    began_s = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - began_s


async def timed_wait(seconds: float) -> float:
    """The same as a coroutine function, which runs on the worker's event loop."""
    began_s = time.perf_counter()
    await asyncio.sleep(seconds)
    return time.perf_counter() - began_s


class CallingAgent:
    """Calls one function again and again, for a number of calls or of seconds.

    Attributes
    ----------
    called
        For each call: when it ended, its seconds, and those of its function.
    """

    name = "calls"

    def __init__(self, function: Callable[[float], object], run_s: float, calls: int) -> None:
        self._function = function
        self._run_s = run_s
        self._calls = calls
        self.called: list[tuple[float, float, float]] = []

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """`count` equal tasks."""
        return [Task(f"t{number}", "x") for number in range(count)]

    async def solve(self, task: Task, ctx: Context) -> None:
        """Call one after the other; the time begins when the first call of each trajectory has returned."""
        await ctx.call(self._function, self._run_s)
        until_s = time.perf_counter() + CEILING_S
        while len(self.called) < self._calls if self._calls else time.perf_counter() < until_s:
            began_s = time.perf_counter()
            ran_s = await ctx.call(self._function, self._run_s)
            ended_s = time.perf_counter()
            self.called.append((ended_s, ended_s - began_s, ran_s))


async def measure_action_overhead(
    model: str | Path,
    *,
    run_s: float = 0.25,
    calls: int = 200,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda message: None,
) -> list[ActionOverheadRow]:
    """Measure all rows, each on its own cluster.

    Parameters
    ----------
    model
        Model directory for tokenizer and template; no step is requested.
    run_s
        Seconds of the functions whose overhead is measured; ARL-Tangram's coding actions take 0.975 s (Table 1).
    calls
        Number of those calls.
    """
    cores = len(own_cores())
    plans: list[tuple[str, Callable[[float], object], int, int, float, int]] = [
        ("process, cores of its own", timed_sleep, cores, cores, run_s, calls),
        ("coroutine", timed_wait, cores, cores, run_s, calls),
        ("process, empty", timed_sleep, cores, cores, 0.0, 0),
        ("process, empty, control path only", timed_sleep, 64, 64, 0.0, 0),
        ("coroutine, empty, control path only", timed_wait, 256, 256, 0.0, 0),
    ]
    rows = []
    for arm, function, cpus, at_once, seconds, count in plans:
        on_progress(f"{arm}: {at_once} at once on {cpus} CPUs")
        agent = CallingAgent(function, seconds, count)
        at_worker_s = await _roll(agent, str(model), cpus, at_once, seed)
        rows.append(_row(arm, cpus, at_once, agent, at_worker_s))
    return rows


async def _roll(agent: CallingAgent, model: str, cpus: int, at_once: int, seed: int) -> list[float]:
    """Run the agent; returns the seconds of its timed actions at the worker, in order of their ends.

    The first call of a trajectory is not timed: it starts a process and imports what the function needs.
    """
    engine = emulated(model, 0.01, slots=4, max_model_len=4096, seed=seed)
    batch = await rolled_out(agent, engine, at_once, tool_cpus=cpus, seed=seed)
    actions = [action for record in batch for action in record.actions[1:]]
    return [action.run_s for action in sorted(actions, key=lambda action: action.finished_s)]


def _row(arm: str, cpus: int, at_once: int, agent: CallingAgent, at_worker_s: Sequence[float]) -> ActionOverheadRow:
    ended_s, call_s, ran_s = np.array(agent.called).T
    worker_ms = 1000 * (np.array(at_worker_s) - ran_s)
    call_ms = 1000 * (call_s - ran_s)
    percentiles = [round(float(np.percentile(each, p)), 2) for each in (worker_ms, call_ms) for p in (50, 99)]
    low, high = (ended_s[0] + share * (ended_s[-1] - ended_s[0]) for share in (0.25, 0.75))
    return ActionOverheadRow(
        arm,
        cpus,
        at_once,
        len(ended_s),
        round(float(ran_s.mean()), 4),
        percentiles[0],
        percentiles[1],
        percentiles[2],
        percentiles[3],
        round(float(call_ms.mean() / 1000 / ran_s.mean()), 4) if ran_s.mean() > 0.01 else 0.0,
        round(float(np.sum((low <= ended_s) & (ended_s < high)) / (high - low)), 1),
    )
