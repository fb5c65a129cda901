"""Agents and recorders of the live tests; travels to the workers by value."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
from distributed import Scheduler

from heddle_dask.engines.contract import GenerateResult
from heddle_dask.environments.base import Context, Task
from heddle_dask.live.worker.rollout_worker import RolloutWorker

cloudpickle.register_pickle_by_value(sys.modules[__name__])


async def echo_tool(text: str, seconds: float = 0.01) -> str:
    await asyncio.sleep(seconds)
    return f"tool: {text}"


async def count_and_maybe_die(marker: str) -> int:
    """Count calls in a file; the first call kills its whole worker."""
    path = Path(marker)
    calls = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(calls))
    if calls == 1:
        await always_die()
    return calls


async def always_die() -> None:
    """Kill the worker that runs this: it has started the fork server, and that this process."""
    psutil.Process().parents()[1].kill()
    await asyncio.sleep(600)


async def lose_both(dask_scheduler: Scheduler) -> bool:
    """A tool worker that has calls, and a rollout worker, in one turn of the loop, as with a node or a network."""
    lost = {str(ws.name): ws for ws in dask_scheduler.workers.values() if ws.name in ("tool-0", "rollout-0")}
    if not lost["tool-0"].processing:
        return False
    addresses = [lost[name].address for name in ("tool-0", "rollout-0")]
    await asyncio.gather(*(dask_scheduler.remove_worker(address, stimulus_id="test") for address in addresses))
    return True


class ToolAgent:
    """`steps` steps with a tool call after each."""

    name = "tool-agent"

    def __init__(self, steps: int = 3, tokens: int = 20, tool_s: float = 0.01) -> None:
        self.steps = steps
        self.tokens = tokens
        self.tool_s = tool_s

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        return [
            Task(
                f"t{i}",
                f"Task number {i}, seed {seed}. " * (1 + i % 3),
                domain=f"size {1 + i % 3}",
                max_steps=self.steps,
            )
            for i in range(count)
        ]

    async def solve(self, task: Task, ctx: Context) -> float | None:
        ctx.append("system", "You are an agent.")
        ctx.append("user", task.prompt)
        for step in range(self.steps):
            await ctx.generate(max_tokens=self.tokens, ignore_eos=True)
            ctx.append("tool", await ctx.call(echo_tool, f"{task.task_id} {step}", self.tool_s))
        return 1.0


class FaultyAgent(ToolAgent):
    """Every third task raises after its first step, every fifth calls a tool that raises, the seventh exits."""

    name = "faulty-agent"

    async def solve(self, task: Task, ctx: Context) -> float | None:
        number = int(task.task_id.removeprefix("t"))
        ctx.append("user", task.prompt)
        await ctx.generate(max_tokens=5, ignore_eos=True)
        if number % 3 == 0:
            raise ZeroDivisionError(f"agent of task {number} is broken")
        if number == 7:
            sys.exit(3)
        if number % 5 == 0:
            await ctx.call(int, "not a number")
        return None if number % 2 else 0.5


class RecordingWorker(RolloutWorker):
    """Writes down every context that goes to the engine."""

    def __init__(self, spec: Any, path: str) -> None:
        super().__init__(spec)
        self.path = path

    async def _generate(self, client: Any, call: Any, context: Any, priority: float) -> GenerateResult:
        result = await super()._generate(client, call, context, priority)
        row = {
            "trajectory": call.step_id.trajectory_id,
            "step": call.step_id.step_index,
            "seen": context.token_ids.tolist(),
            "sampled": list(result.token_ids),
        }
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return result


def hang(marker: str) -> None:
    """A tool that never ends; writes the id of its process first."""
    path = Path(marker)
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)
    while True:
        time.sleep(60)


async def load_without_end(name: str, dask_worker: Any) -> None:
    """On all workers (`Client.run`): the engine of this one loads weights for ever, from the next installation on."""
    hosted = dask_worker.plugins[RolloutWorker.name]
    if hosted.client is not None and hosted.engine_id.startswith(name):
        await hosted.client.ask("/faults", json.dumps({"load_delay_s": 1e6}).encode())
