"""A soak: trajectories on emulated engines for minutes, while engines and workers are killed at random.

What is looked for is what a short test does not show: memory, files, processes or shared memory that grow, and
trajectories that are lost. Only processes that this one has started are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import linear_regression
from typing import Any, ClassVar

import psutil
from distributed import Client

from benchmarks.process_usage import KINDS, usage, victims
from benchmarks.row_file import Row
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.environments.base import Context, Task
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.inputs.rollout_inputs import Output
from heddle_dask.live.driver.options import Budget, Engines
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.records.causes import CauseCounts, Ended

KILLED = ("engine", "rollout", "tool")
_TOOL_WORKERS = 2
_BATCH_S = 60.0
_SAMPLES = 60
_LEAST_INTERVAL_S = 5.0
_MEMORY_BATCH, _MEMORY_BATCH_S = 1000, 2.0
_FLAT_AFTER = 10_000
_SETTLE_S = 10.0
# Faults are frequent here: a trajectory may meet several, and must survive them.
_RETRIES = RetryPolicy(max_losses=50, max_action_attempts=50)


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """What to do.

    Attributes
    ----------
    kill_every_s
        Mean seconds between two kills; 0: none.
    """

    minutes: float
    engines: int
    trajectories_per_minute: int
    kill_every_s: float
    seed: int

    @property
    def batches(self) -> list[tuple[int, float]]:
        """Trajectories of each batch, and the seconds over which they start."""
        total_s = self.minutes * 60
        spans = [min(_BATCH_S, total_s - n * _BATCH_S) for n in range(math.ceil(total_s / _BATCH_S))]
        return [(max(1, round(self.trajectories_per_minute * span / 60)), span) for span in spans]

    @property
    def interval_s(self) -> float:
        """Seconds between two looks at the processes."""
        return max(_LEAST_INTERVAL_S, self.minutes * 60 / _SAMPLES)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Trajectories in one session as fast as they go, a thousand at a time, with a look after each; without kills."""

    trajectories: int
    engines: int
    seed: int
    kill_every_s: float = 0.0
    interval_s: ClassVar[None] = None

    @property
    def batches(self) -> list[tuple[int, float]]:
        """As of `SoakPlan`."""
        return [(min(_MEMORY_BATCH, left), _MEMORY_BATCH_S) for left in range(self.trajectories, 0, -_MEMORY_BATCH)]


@dataclass(slots=True)
class SoakReport:
    """What came of it.

    Attributes
    ----------
    rows
        Looks at the processes (`ProcessUsage`), each with its minute and the trajectories that had ended by then.
    missing
        Trajectories that have no record at all.
    left
        Processes that this one started and that run after its end, as command lines.
    """

    plan: SoakPlan | MemoryPlan
    rows: list[Row] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)
    causes: CauseCounts = field(default_factory=CauseCounts)
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KILLED, 0))
    missing: int = 0
    left: list[str] = field(default_factory=list)

    @property
    def trajectories(self) -> int:
        """Those that have ended."""
        return sum(self.statuses.values())

    @property
    def succeeded(self) -> bool:
        """Whether every trajectory completed and nothing is left behind."""
        return not self.missing and not self.left and set(self.statuses) <= {"completed"}

    def growth_mib(self) -> dict[str, float]:
        """MiB by kind of process per 1,000 trajectories after the first 10,000, by least squares."""
        late = [row for row in self.rows if row["trajectories"] >= _FLAT_AFTER]
        if len(late) < 2:
            return {}
        thousands = [row["trajectories"] / 1000 for row in late]
        return {
            kind: round(linear_regression(thousands, [row["rss_mib"][kind] for row in late]).slope, 3) for kind in KINDS
        }

    def as_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            **asdict(self.plan),
            "rows": self.rows,
            "growth_mib_per_1000": self.growth_mib(),
            "trajectories": self.trajectories,
            "completed": self.statuses.get("completed", 0),
            "lost": self.statuses.get("lost", 0) + self.missing,
            "failed": self.statuses.get("failed", 0),
            "causes": [row.as_json() for row in self.causes.rows()],
            "kills": self.kills,
            "left": self.left,
        }


async def short_tool(text: str) -> str:
    """A tool that waits."""
    await asyncio.sleep(0.05)
    return text


def busy_tool(numbers: int) -> int:
    """A tool that computes, in a thread."""
    return sum(i * i for i in range(numbers))


class SoakAgent:
    """Short trajectories of two to five steps with a tool call after each; starts are spread over a batch."""

    name = "soak"

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"soak-agent-{seed}")
        self.span_s = 0.0

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """`count` tasks, each with its number of steps."""
        return [Task(f"s{i}", "x" * 64, {"steps": self._rng.randint(2, 5)}) for i in range(count)]

    async def solve(self, task: Task, ctx: Context) -> float:
        """Alternate steps and tool calls."""
        await asyncio.sleep(self._rng.uniform(0, self.span_s))
        ctx.append("user", task.prompt)
        for step in range(task.payload["steps"]):
            await ctx.generate(max_tokens=24, ignore_eos=True)
            if step % 2:
                said = await ctx.call(busy_tool, 20_000, label="busy")
            else:
                said = await ctx.call(short_tool, f"step {step}", label="short")
            ctx.append("tool", str(said))
        return 1.0


async def soak(plan: SoakPlan | MemoryPlan, model: str, out: Path | None, on_row: Callable[[Row], None]) -> SoakReport:
    """Run the plan to its end.

    Parameters
    ----------
    out
        Store of the trajectories; None: a temporary one.
    on_row
        Takes each look at the processes.
    """
    report = SoakReport(plan)
    with tempfile.TemporaryDirectory(prefix="heddle-soak-") as directory:
        await _run(plan, model, out or Path(directory) / "soak.zarr", report, on_row)
    report.left = await _left_processes()
    return report


async def _run(
    plan: SoakPlan | MemoryPlan, model: str, out: Path, report: SoakReport, on_row: Callable[[Row], None]
) -> None:
    agent = SoakAgent(plan.seed)
    spec = EngineSpec(
        "emulated", model, slots=16, max_model_len=4096, options=EmulatedOptions({"seconds_per_token": 0.005})
    )
    async with (
        LocalRolloutCluster(
            plan.engines, tool_workers=_TOOL_WORKERS, tool_cpus=4, dashboard=False, asynchronous=True
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
        Rollout(
            client,
            env=agent,
            model=model,
            engines=Engines(spec=spec, count=plan.engines),
            seed=plan.seed,
            out=Output(out),
            budget=Budget(sandbox="weak", retries=_RETRIES),
        ) as rollout,
    ):
        look = partial(_look, report, time.monotonic(), on_row)
        async with _beside(_watch(look, plan.interval_s), _kill_at_random(plan, report)):
            for count, span_s in plan.batches:
                agent.span_s = span_s
                before = report.trajectories
                async for record in rollout.stream(count):
                    report.statuses[record.status] = report.statuses.get(record.status, 0) + 1
                    report.causes.add(Ended(record.trajectory_id, record.status, record.cause, record.detail))
                report.missing += count - (report.trajectories - before)
                if plan.interval_s is None:
                    look()
        if plan.interval_s is not None:
            look()


@contextlib.asynccontextmanager
async def _beside(*coroutines: Any) -> AsyncIterator[None]:
    """Run these until the block ends."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


async def _watch(look: Callable[[], None], interval_s: float | None) -> None:
    look()
    while interval_s is not None:
        await asyncio.sleep(interval_s)
        look()


def _look(report: SoakReport, began_s: float, on_row: Callable[[Row], None]) -> None:
    minute = round((time.monotonic() - began_s) / 60, 2)
    row = {"minute": minute, "trajectories": report.trajectories, **asdict(usage())}
    report.rows.append(row)
    on_row(row)


async def _kill_at_random(plan: SoakPlan | MemoryPlan, report: SoakReport) -> None:
    """End one engine or worker at a time with SIGKILL, at times drawn from the seed, once trajectories have ended.

    An engine that is killed while it starts for the first time counts as one that cannot start.
    """
    rng = random.Random(f"soak-kills-{plan.seed}")
    while not report.trajectories:
        await asyncio.sleep(0.1)
    while plan.kill_every_s:
        await asyncio.sleep(rng.expovariate(1 / plan.kill_every_s))
        kind = rng.choice(KILLED)
        found = sorted(victims(kind), key=lambda process: process.pid)
        place = rng.random()
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(found[int(place * len(found))].pid, signal.SIGKILL)
                report.kills[kind] += 1


async def _left_processes() -> list[str]:
    """Command lines of descendants that do not end; Python's own resource tracker ends with this process."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        left = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if line and "resource_tracker" not in line:
                    left.append(line[:200])
        if not left or time.monotonic() >= deadline:
            return left
        await asyncio.sleep(0.2)


def table_line(row: Row) -> str:
    """A row as a line of text, for `HEADER`."""
    held = "  ".join(f"{mib:9.0f}" for mib in row["rss_mib"].values())
    return (
        f"{row['minute']:6.1f}  {row['trajectories']:12d}  {held}  {row['open_files']:10d}  "
        f"{row['processes']:9d}  {row['shm_files']:9d}"
    )


HEADER = (
    "minute  trajectories  MiB: driver  scheduler    rollout       tool     engine  open files  processes  shm files"
)
