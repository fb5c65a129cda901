"""Groups from an endless source on a real cluster: back-pressure, redundancy, failing environments, resumption."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from worlds.live_world import emulated, run
from worlds.shared_cluster import shared_cluster

from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.environments.base import Context, EnvironmentFailed, Task
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.mix import MixedSource
from heddle_dask.environments.task_sources import EnvironmentSource
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.records.reader import RunReader
from heddle_dask.training.groups import FinishedGroup, GroupPlan

pytestmark = pytest.mark.cluster

failures: Counter[str] = Counter()
begun: list[str] = []


def tasks(name: str) -> Any:
    return lambda count, seed: [Task(f"{name}-{seed}-{n}", f"task {n}") for n in range(count)]


async def answers(task: Task, ctx: Context) -> float:
    begun.append(task.task_id)
    ctx.append("user", task.prompt)
    reply = await ctx.generate(max_tokens=4 + ctx.seed % 5)
    return float(len(reply.token_ids) % 2)


async def fails_at_first(task: Task, ctx: Context) -> float:
    """The environment of each trajectory fails once, after a step; that of one task always does."""
    ctx.append("user", task.prompt)
    await ctx.generate(max_tokens=4)
    key = f"{task.task_id}/{ctx.seed}"
    failures[key] += 1
    if failures[key] == 1 or task.task_id.endswith("-1"):
        raise EnvironmentFailed("reset: the game server has gone")
    await ctx.generate(max_tokens=4)
    return 1.0


async def one_is_slow(task: Task, ctx: Context) -> float:
    """The attempt with the largest seed of a group waits for ever, in a step or in a tool."""
    ctx.append("user", task.prompt)
    await ctx.generate(max_tokens=4)
    begun.append(task.task_id)
    if begun.count(task.task_id) == 3:
        await asyncio.Event().wait()
    return 1.0


def source(solve: Any, name: str, seed: int = 1) -> EnvironmentSource:
    environment = FunctionEnvironment(solve, name=name, tasks=tasks(name))
    return EnvironmentSource(environment, seed, round_tasks=4)


def test_groups_of_an_endless_source(model_dir: str, tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"

    def rollout(client: Any, mode: str = "create", **options: Any) -> Rollout:
        from heddle_dask.live.driver.inputs.rollout_inputs import Output

        return Rollout(
            client,
            env=answers,
            model=model_dir,
            engines=emulated(model_dir),
            out=Output(out, mode),  # type: ignore[arg-type]
            **options,
        )

    async def body() -> None:
        async with shared_cluster(engines=1) as client:
            mixed = MixedSource([(source(answers, "a"), 2.0), (source(answers, "b"), 1.0)], 5)
            plan = GroupPlan(members=2, groups_per_batch=3)
            async with rollout(client) as rolled:
                stream = rolled.stream_groups(mixed, plan)
                stream.open_batches(2)
                groups = [await anext(stream) for _ in range(6)]
                # Two batches are full: no task is taken until the next one is opened.
                assert sum(stream.mix_sampled.values()) == 6 and len(begun) == 12
                stream.open_batches(3)
                groups.append(await anext(stream))
                await stream.aclose()
            assert len({group.group_id for group in groups}) == 7
            assert all(len(group.records) == 2 for group in groups)
            expected = [mixed.task(position) for position in range(9)]
            of = {each.task.task_id: each.environment.name for each in expected if each}
            assert {group.environment for group in groups} == {"a", "b"}
            assert all(r.environment == of[r.task_id] for group in groups for r in group.records)
            # It goes on where it was: groups that were delivered do not come again, those that had begun do.
            async with rollout(client, "resume") as rolled:
                stream = rolled.stream_groups(mixed, plan)
                stream.open_batches(4)
                more: list[FinishedGroup] = [await anext(stream) for _ in range(5)]
                await stream.aclose()
            ids = [group.group_id for group in (*groups, *more)]
            assert sorted(ids) == [f"g{n:06d}" for n in range(12)]
            assert [of.get(g.task_id, g.environment) for g in more] == [g.environment for g in more]

    begun.clear()
    run(body())
    stored = [record.trajectory_id for record in RunReader(out)]
    assert len(stored) == len(set(stored)) and len(stored) >= 24


def test_redundant_members_are_cancelled_and_failed_environments_replaced(model_dir: str) -> None:
    async def body() -> None:
        async with shared_cluster(engines=1) as client:
            begun.clear()
            async with Rollout(client, env=one_is_slow, model=model_dir, engines=emulated(model_dir)) as rolled:
                plan = GroupPlan(members=2, extra_members=1, groups_per_batch=2)
                stream = rolled.stream_groups(source(one_is_slow, "slow"), plan)
                stream.open_batches(1)
                groups = [await anext(stream) for _ in range(2)]
                await stream.aclose()
            assert [len(group.records) for group in groups] == [2, 2]
            # The slow member has answered once, or was cancelled before that.
            wasted = [dict(group.cancelled_tokens) for group in groups]
            assert all(each in ({"redundant": 0}, {"redundant": 4}) for each in wasted)
            # An answer that comes after the end of its member counts for the stream alone.
            counted = sum(each["redundant"] for each in wasted)
            assert counted <= stream.wasted_tokens.get("redundant", 0) <= 8

            retries = RetryPolicy(environment_backoff_s=0, max_environment_attempts=2, max_task_failures=3)
            lines: list[str] = []
            async with Rollout(
                client,
                env=fails_at_first,
                model=model_dir,
                engines=emulated(model_dir),
                budget=Budget(retries=retries),
                progress=lines.append,
            ) as rolled:
                stream = rolled.stream_groups(source(fails_at_first, "f"), GroupPlan(2, groups_per_batch=3))
                stream.open_batches(1)
                groups = [await anext(stream) for _ in range(3)]
                await stream.aclose()
            assert [len(group.records) for group in groups] == [2, 2, 2]
            for record in (record for group in groups for record in group.records):
                assert (record.status, record.reward) == ("completed", 1.0)
                assert record.metadata["environment_failures"] == 1 and len(record.steps) == 2
            assert not any(group.task_id.endswith("-1") for group in groups)
            assert stream.dropped_groups == {"environment": 1}
            assert any("f-1-1 is quarantined" in line for line in lines)

    run(body())
