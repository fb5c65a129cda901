"""The order of actions on a pool that is always full: by arrival, or most predicted work left first. Live.

Commands and suites sleep: they hold a CPU of the pool and use none of the machine, so the pool may be larger than it.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distributed import Client

from benchmarks.actions.rows import ActionRow
from benchmarks.emulated_rollouts import completed, emulated
from benchmarks.experiments import Study
from benchmarks.tables import ratio_fields
from heddle_dask.environments.base import Context, Task
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.strategies.presets import Strategy

CPUS = 4
TRAJECTORIES = 48
_COMMAND_S = 0.15
_STEP_TOKENS = 40
_TOKEN_S = 0.004


class SleepingAgent:
    """Steps and commands, and a suite at the end; each holds one CPU. Runs in the driver."""

    name = "sleeping suites"

    def __init__(self, seed: int) -> None:
        self.acts_s: list[float] = []
        self._seed = seed

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """Tasks with 1 to 12 commands and a suite of 0.1 to 8 s, most of them short."""
        tasks = []
        for number in range(count):
            rng = random.Random(f"sleeping suites {self._seed} {number}")
            steps, suite_s = rng.randint(1, 12), min(8.0, max(0.1, rng.lognormvariate(-0.5, 1.0)))
            tasks.append(
                Task(
                    f"suite-{number}",
                    f"Task {number}: {steps} commands.",
                    {"steps": steps, "suite_s": suite_s},
                    known_tokens=_STEP_TOKENS * (steps + 1),
                    known_tools_s=_COMMAND_S * steps + suite_s,
                    max_steps=steps + 1,
                )
            )
        return tasks

    async def solve(self, task: Task, ctx: Context) -> float:
        """Follow the task."""
        ctx.append("user", task.prompt)
        for _ in range(task.payload["steps"]):
            await ctx.generate(max_tokens=_STEP_TOKENS, ignore_eos=True)
            await self._hold(ctx, _COMMAND_S)
            ctx.append("tool", "done")
        await ctx.generate(max_tokens=_STEP_TOKENS, ignore_eos=True)
        await self._hold(ctx, task.payload["suite_s"])
        return 1.0

    async def _hold(self, ctx: Context, seconds: float) -> None:
        began_s = time.perf_counter()
        await ctx.call(time.sleep, seconds, cpus=1)
        self.acts_s.append(time.perf_counter() - began_s)


@dataclass(slots=True)
class PassFigures:
    """Figures of one arm in one pass over the tasks, by seed."""

    act_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)


async def _roll(model: str | Path, order: str, predictor: str, seed: int, passes: Sequence[PassFigures]) -> None:
    agent = SleepingAgent(seed)
    spec = emulated(str(model), _TOKEN_S, slots=TRAJECTORIES, max_model_len=4_096, seed=seed)
    async with (
        LocalRolloutCluster(engines=1, tool_cpus=CPUS, dashboard=False, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        strategy = Strategy("heddle", (f"predictor={predictor}", f"actions=elastic,order={order}"))
        budget = Budget(max_context_tokens=4_096)
        rollout = Rollout(client, env=agent, model=model, engines=spec, strategy=strategy, budget=budget, seed=seed)
        async with rollout:
            for figures in passes:
                agent.acts_s.clear()
                began_s = time.perf_counter()
                completed(await rollout.run(TRAJECTORIES))
                figures.step_s.append(time.perf_counter() - began_s)
                figures.act_s.append(statistics.fmean(agent.acts_s))


async def _measure(study: Study) -> list[ActionRow]:
    rows: list[ActionRow] = []
    for predictor, names in (("oracle", ["exact predictions"]), ("xgboost", ["tasks seen first", "tasks seen before"])):
        found = {order: [PassFigures() for _ in names] for order in ("fcfs", "tail")}
        for seed in study.seeds:
            for order in found if seed % 2 else reversed(found):
                study.runner.say(f"{predictor}, order {order}, seed {seed}")
                await _roll(study.model, order, predictor, seed, found[order])
        for name, *arms in zip(names, *found.values(), strict=True):
            rows += [_row(name, order, one, arms[0]) for order, one in zip(found, arms, strict=True)]
    return rows


def _row(predictions: str, order: str, one: PassFigures, first_come: PassFigures) -> ActionRow:
    acts = [mine / theirs for mine, theirs in zip(one.act_s, first_come.act_s, strict=True)]
    steps = [mine / theirs for mine, theirs in zip(one.step_s, first_come.step_s, strict=True)]
    return ActionRow(
        "order-live",
        f"order={order}, {predictions}",
        TRAJECTORIES,
        act_mean_s=statistics.fmean(one.act_s),
        step_s=statistics.fmean(one.step_s),
        cores=CPUS,
        seeds=len(steps),
        step_ratio=statistics.fmean(steps),
        note=f"steps {min(steps):.3f} to {max(steps):.3f} of first come",
        **ratio_fields(acts),
    )


def order_rows(study: Study) -> list[ActionRow]:
    """The rows of ``python -m benchmarks actions --experiment order-live``; ratios are to the order of arrival."""
    return asyncio.run(_measure(study))
