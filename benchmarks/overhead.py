"""Overhead of the control plane: latency added to each LLM step and tool call, and the maximum steps per second.

The engine is the emulated one, a real process with HTTP that takes exactly the time of its cost model; the cluster is
real. *Added* is the time from ``ctx.generate`` to its return less the time of the engine's cost model (1 s of
decoding, and up to 10 ms until the running iteration ends, as in a real engine), and from ``ctx.call`` to its return
less the tool's sleep. It includes Dask, HTTP, the emulated engine's own work and all timers.

For comparison, the overhead of Dask alone is measured in the same run: the same agents on the same kind of cluster,
where every step is a bare ``client.submit`` of a coroutine that sleeps 1 s. Machines differ and drift; the difference
is the overhead of this package.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import uvloop
from distributed import Client

from benchmarks.emulated_rollouts import emulated, rolled_out
from benchmarks.tables import Column, print_measured_rows
from heddle_dask.cli.engine_option import chosen_model
from heddle_dask.cli.shared_options import COUNT, shared_options, whole_numbers
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.environments.base import Context, Task
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.messages import STREAM_INTERVAL_S

STEP_S = 1.0
STEP_TOKENS = 100
TOOL_S = 0.2
# With fewer steps per trajectory the burst at the start would dominate.
STEPS_PER_TRAJECTORY = 10
CEILING_S = 8.0


@dataclass(frozen=True, slots=True)
class OverheadRow:
    """One row of the table: medians over `repeats` runs.

    Latencies in milliseconds; `steps_per_s` with steps of zero length; `dask_ms_p50`: overhead of a bare Dask future;
    `added_ms_p50_range`: minimum and maximum of the repeats.
    """

    trajectories: int
    repeats: int
    added_ms_p50: float
    added_ms_p50_range: tuple[float, float]
    added_ms_p99: float
    action_added_ms_p50: float
    action_added_ms_p99: float
    steps_per_s: float
    dask_ms_p50: float


async def sleep_tool(seconds: float) -> None:
    """A tool that takes `seconds` and no CPU."""
    await asyncio.sleep(seconds)


class TimedAgent:
    """Alternates steps of `STEP_S` and tool calls of `TOOL_S`, and times each.

    Trajectories start spread over one period; otherwise all requests would be in the same millisecond.
    """

    name = "overhead"

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.step_added_s: list[float] = []
        self.action_added_s: list[float] = []

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """`count` equal tasks."""
        return [Task(f"t{i}", "x" * 64) for i in range(count)]

    async def solve(self, task: Task, ctx: Context) -> None:
        """Run the fixed alternation."""
        await asyncio.sleep(self._rng.uniform(0, STEP_S + TOOL_S))
        for step in range(STEPS_PER_TRAJECTORY):
            ctx.append_tokens([65 + step] * 16)
            began_s = time.perf_counter()
            reply = await ctx.generate(max_tokens=STEP_TOKENS, ignore_eos=True)
            stepped_s = time.perf_counter()
            await ctx.call(sleep_tool, TOOL_S)
            acted_s = time.perf_counter()
            self.step_added_s.append(stepped_s - began_s - reply.engine_s)
            self.action_added_s.append(acted_s - stepped_s - TOOL_S)


class EmptyAgent:
    """Requests one-token steps as fast as possible, until its time is up."""

    name = "ceiling"

    def __init__(self, seconds: float = CEILING_S) -> None:
        self.seconds = seconds
        self.finished_s: list[float] = []

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """`count` equal tasks."""
        return [Task(f"t{i}", "x" * 64) for i in range(count)]

    async def solve(self, task: Task, ctx: Context) -> None:
        """Request steps until the time is up; the context stays short."""
        until_s = time.perf_counter() + self.seconds
        while time.perf_counter() < until_s:
            ctx.append_tokens([66])
            await ctx.generate(max_tokens=1, ignore_eos=True)
            self.finished_s.append(time.perf_counter())

    def steps_per_s(self) -> float:
        """Rate over the middle half of the time, without start and end."""
        first, last = self.finished_s[0], self.finished_s[-1]
        low, high = first + 0.25 * (last - first), first + 0.75 * (last - first)
        return sum(low <= at < high for at in self.finished_s) / (high - low)


async def measure_overhead(
    model: str | Path,
    trajectories: Sequence[int] = (50, 200, 400),
    *,
    repeats: int = 1,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda message: None,
) -> list[OverheadRow]:
    """Measure all rows, each run on its own cluster: scheduler, one rollout worker, one tool worker.

    Parameters
    ----------
    model
        Model directory for tokenizer and template; its weights are not used.
    """
    rows = []
    for count in trajectories:
        runs = []
        for repeat in range(repeats):
            told = f"{count} trajectories, run {repeat + 1} of {repeats}"
            on_progress(f"latency with {told}")
            timed = TimedAgent(seed + repeat)
            await _roll(timed, str(model), STEP_S / STEP_TOKENS, count, seed)
            on_progress(f"bare Dask futures with {told}")
            bare_s = await _bare_dask(count, seed + repeat)
            on_progress(f"ceiling with {told}")
            empty = EmptyAgent()
            await _roll(empty, str(model), 0.0, count, seed)
            runs.append(_run_figures(timed, empty, bare_s))
        rows.append(_row(count, runs))
    return rows


async def _sleep_step(seconds: float, tokens: bytes) -> bytes:
    """Function of the bare Dask future: sleeps, and returns as many bytes as a step's tokens and logprobs."""
    await asyncio.sleep(seconds)
    return tokens


async def _bare_dask(count: int, seed: int) -> list[float]:
    """Seconds that Dask alone adds to a future of `STEP_S`, with `count` agents at once."""
    added_s: list[float] = []
    rng = random.Random(seed)

    async def agent(client: Client, number: int) -> None:
        await asyncio.sleep(rng.uniform(0, STEP_S + TOOL_S))
        for step in range(STEPS_PER_TRAJECTORY):
            began_s = time.perf_counter()
            future = client.submit(_sleep_step, STEP_S, bytes(8 * STEP_TOKENS), key=("bare", number, step), pure=False)
            await future
            added_s.append(time.perf_counter() - began_s - STEP_S)
            future.release()
            await asyncio.sleep(TOOL_S)

    async with (
        LocalRolloutCluster(engines=1, tool_workers=0, dashboard=False, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.wait_for_workers(1)
        dask.shorten_own_interval(client, STREAM_INTERVAL_S)
        await asyncio.gather(*(agent(client, number) for number in range(count)))
    return added_s


async def _roll(agent: TimedAgent | EmptyAgent, model: str, seconds_per_token: float, count: int, seed: int) -> None:
    budget = Budget(max_steps=1_000_000, max_context_tokens=65_536)
    spec = emulated(model, seconds_per_token, seed=seed)
    await rolled_out(agent, spec, count, tool_cpus=4096, seed=seed, budget=budget)


def _run_figures(timed: TimedAgent, empty: EmptyAgent, bare_s: Sequence[float]) -> dict[str, float]:
    step_ms = 1000 * np.array(timed.step_added_s)
    action_ms = 1000 * np.array(timed.action_added_s)
    return {
        "added_ms_p50": float(np.percentile(step_ms, 50)),
        "added_ms_p99": float(np.percentile(step_ms, 99)),
        "action_added_ms_p50": float(np.percentile(action_ms, 50)),
        "action_added_ms_p99": float(np.percentile(action_ms, 99)),
        "steps_per_s": empty.steps_per_s(),
        "dask_ms_p50": float(np.percentile(1000 * np.array(bare_s), 50)),
    }


def _row(count: int, runs: Sequence[dict[str, float]]) -> OverheadRow:
    medians = {name: round(float(np.median([run[name] for run in runs])), 2) for name in runs[0]}
    p50s = [round(run["added_ms_p50"], 2) for run in runs]
    return OverheadRow(trajectories=count, repeats=len(runs), added_ms_p50_range=(min(p50s), max(p50s)), **medians)


COLUMNS: Sequence[Column] = (
    ("trajectories", lambda row: str(row.trajectories)),
    ("step added p50 ms", lambda row: f"{row.added_ms_p50:.1f}"),
    ("range", lambda row: f"{row.added_ms_p50_range[0]:.1f}-{row.added_ms_p50_range[1]:.1f}"),
    ("p99", lambda row: f"{row.added_ms_p99:.1f}"),
    ("action p50 ms", lambda row: f"{row.action_added_ms_p50:.1f}"),
    ("p99", lambda row: f"{row.action_added_ms_p99:.1f}"),
    ("bare Dask ms", lambda row: f"{row.dask_ms_p50:.1f}"),
    ("steps/s", lambda row: f"{row.steps_per_s:.0f}"),
)


@click.command("overhead")
@click.option("--trajectories", default="50,200,400", show_default=True, help="Counts to measure, comma-separated.")
@click.option("--model", default=None, help="Directory with a tokenizer [default: the shipped tiny-agent].")
@click.option("--repeats", default=1, show_default=True, type=COUNT, help="Runs; medians are shown.")
@shared_options
def overhead(trajectories: str, model: str | None, repeats: int, as_json: bool, seed: int) -> None:
    """Latency added to each LLM step and tool call, and the ceiling in steps per second."""
    counts = whole_numbers("--trajectories", trajectories, "50,200,400")
    collect_seldom()
    rows = uvloop.run(
        measure_overhead(
            chosen_model(model, "emulated"),
            counts,
            repeats=repeats,
            seed=seed,
            on_progress=lambda message: click.echo(message, err=True),
        )
    )
    print_measured_rows(rows, COLUMNS, as_json=as_json)
