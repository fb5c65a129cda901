"""The agent of the runs: short trajectories, whose ends are counted in a file."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.soak import short_tool
from heddle_dask.environments.base import Context, Task

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDED_VARIABLE = "HEDDLE_FAULT_ENDED"
SPAN_VARIABLE = "HEDDLE_FAULT_SPAN_S"
"""Seconds over which the trajectories start."""


class ToolBroke(Exception):
    """What a tenth of the trajectories raise."""


def tasks(count: int, seed: int) -> Sequence[Task]:
    """`count` tasks, each with its number of steps and the share of the span after which it starts."""
    rng = random.Random(f"fault-agent-{seed}")
    return [Task(f"f{i}", f"task {i}", {"steps": rng.randint(1, 3), "start": rng.random()}) for i in range(count)]


async def solve(task: Task, ctx: Context) -> float:
    """Alternate steps and tool calls."""
    with _counted():
        await _steps(task, ctx)
    return 1.0


async def often_fails(task: Task, ctx: Context) -> float:
    """As `solve`; each tenth raises after its first step."""
    with _counted():
        await _steps(task, ctx)
        if int(task.task_id[1:]) % 10 == 0:
            raise ToolBroke(task.task_id)
    return 1.0


async def _steps(task: Task, ctx: Context) -> None:
    await asyncio.sleep(task.payload["start"] * float(os.environ[SPAN_VARIABLE]))
    ctx.append("user", task.prompt)
    for step in range(task.payload["steps"]):
        await ctx.generate(max_tokens=16, ignore_eos=True)
        ctx.append("tool", str(await ctx.call(short_tool, f"step {step}", label="short")))


@contextmanager
def _counted() -> Iterator[None]:
    """One more byte in the file when the trajectory has ended."""
    try:
        yield
    finally:
        with open(os.environ[ENDED_VARIABLE], "ab", buffering=0) as file:
            file.write(b".")
