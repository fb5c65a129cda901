"""Groups that go on from the prefix of an earlier attempt, on a real cluster, with the state of a sandbox."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds.live_world import emulated, run, until
from worlds.shared_cluster import shared_cluster

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Context, Task
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.task_sources import EnvironmentSource
from heddle_dask.live.driver.inputs.rollout_inputs import Output
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.records.reader import RunReader
from heddle_dask.records.token_record import Attribution
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.records.trajectory_prefix import PREFIX, TrajectoryPrefix
from heddle_dask.training.group_records import trajectory_group
from heddle_dask.training.groups import FinishedGroup, GroupPlan, TrainingBatch
from heddle_dask.training.prefix_sampling import PrefixRule
from heddle_dask.training.sample_rows import sample_rows

pytestmark = pytest.mark.cluster

STEPS, MEMBERS = 4, 4
PLAN = GroupPlan(MEMBERS, groups_per_batch=1, prefixes=PrefixRule())

begun: Counter[str] = Counter()
waiting: Counter[str] = Counter()
released = asyncio.Event()


async def keeps_a_log(task: Task, ctx: Context) -> float:
    """Each step adds a line to a file of a sandbox; of the first four attempts at a task, one passes, then half."""
    number = begun[task.task_id]
    begun[task.task_id] += 1
    ctx.append("user", f"{task.prompt} {ctx.seed}")
    async with ctx.sandbox(memory="64 MiB") as box:
        for step in range(STEPS):
            if step == STEPS - 1 and number >= MEMBERS:
                waiting[task.task_id] += 1
                await released.wait()
            await ctx.generate(max_tokens=4, ignore_eos=True)
            lines = await box.exec(f"echo {step} >> log; cat log | tr '\\n' ' '")
            ctx.append("tool", lines.stdout)
        ctx.metadata["log"] = (await box.exec("cat log")).stdout.split()
    return float(number == 0 if number < MEMBERS else number % 2)


async def never_says_the_same(task: Task, ctx: Context) -> float:
    number = begun[task.task_id]
    begun[task.task_id] += 1
    ctx.append("user", task.prompt)
    for step in range(STEPS):
        await ctx.generate(max_tokens=4, ignore_eos=True)
        ctx.append("tool", f"{number} {step}")
    return float(number == 0)


def source(solve: Any, name: str) -> EnvironmentSource:
    tasks = [Task(f"{name}-{n}", f"task {n}") for n in range(4)]
    return EnvironmentSource(FunctionEnvironment(solve, name=name, tasks=lambda count, seed: tasks), 1, round_tasks=4)


def check_goes_on(record: TrajectoryRecord, before: TrajectoryRecord, steps: int) -> None:
    """The attempt has the tokens of the one before, masked, and the state that they led to."""
    context = before.steps[steps].token_start
    assert record.metadata[PREFIX] == {
        "source": before.trajectory_id,
        "steps": steps,
        "tokens": context,
        "sampled_tokens": 4 * steps,
    }
    (branch,), (old,) = record.branches, before.branches
    assert branch.token_ids[:context].tolist() == old.token_ids[:context].tolist()
    assert not branch.loss_mask[:context].any() and branch.loss_mask.sum() == 4 * (STEPS - steps)
    replayed = branch.token_ids[branch.attribution == Attribution.PREFIX].tolist()
    assert replayed == old.token_ids[:context][old.loss_mask[:context]].tolist()
    assert [step.step_index for step in record.steps] == list(range(steps, STEPS))
    assert record.metadata["log"] == [str(step) for step in range(STEPS)], "calls of the prefix have run again"


def test_a_skewed_group_goes_on_from_a_prefix_also_when_its_run_is_resumed(model_dir: str, tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    tasks = source(keeps_a_log, "log")

    def rollout(client: Any, mode: Any = "create", **options: Any) -> Rollout:
        options = {"env": keeps_a_log, "out": Output(out, mode), "budget": Budget(sandbox="weak"), **options}
        return Rollout(client, model=model_dir, engines=emulated(model_dir), **options)

    async def body() -> tuple[FinishedGroup, FinishedGroup]:
        async with shared_cluster(engines=1) as client:
            async with rollout(client) as rolled:
                stream = rolled.stream_groups(tasks, PLAN)
                stream.open_batches(1)
                first: FinishedGroup = await anext(stream)
                stream.open_batches(2)
                following = asyncio.ensure_future(anext(stream))
                await until(lambda: waiting["log-0"] == MEMBERS)
                following.cancel()
                await stream.aclose()
            released.set()
            async with rollout(client, "resume") as rolled:
                stream = rolled.stream_groups(tasks, PLAN)
                stream.open_batches(2)
                second: FinishedGroup = await anext(stream)
                await stream.aclose()
            (passed,) = (record for record in first.records if record.reward == 1)
            prefixes = {"log-0": TrajectoryPrefix.of(passed, 3)}
            environment = tasks.environments[0]
            async with rollout(client, out=None, env=environment) as rolled:
                (third,) = await rolled.run([Task("log-0", "task 0")], prefixes=prefixes)
                check_goes_on(third, passed, 3)
                with pytest.raises(BadInput, match=r"g000000/\d attempted another task"):
                    await rolled.run([Task("log-0", "task 1")], prefixes=prefixes)
            return first, second

    begun.clear()
    waiting.clear()
    released.clear()
    first, second = run(body())
    assert (first.group_id, second.group_id, second.task_id) == ("g000000", "g000000c1", "log-0")
    (passed,) = (record for record in first.records if record.reward == 1)
    assert all(PREFIX not in record.metadata for record in first.records)
    assert len({record.trajectory_id for record in second.records}) == MEMBERS
    for record in second.records:
        check_goes_on(record, passed, 2)
    sampled = {tuple(record.branches[0].token_ids[record.branches[0].loss_mask].tolist()) for record in second.records}
    assert len(sampled) == MEMBERS, "each goes on in its own way"
    assert sum(record.reward or 0 for record in second.records) == MEMBERS / 2
    stored = {record.trajectory_id: record for record in RunReader(out)}
    for record in second.records:
        assert stored[record.trajectory_id].branches == record.branches
        assert stored[record.trajectory_id].metadata[PREFIX]["source"] == passed.trajectory_id
    # What a trainer gets: the advantages are those among attempts with the same prefix, and it is masked.
    group = trajectory_group(second, "a")
    assert group is not None and group.has_variance
    for row in sample_rows(TrainingBatch(1, "a", (group,))):
        context = passed.steps[2].token_start
        assert not row.trained[:context].any() and row.trained.sum() == 8
        assert np.isnan(row.logprobs[:context]).all() and abs(row.advantage) == 0.5


def test_an_environment_that_answers_otherwise_is_refused_with_one_line(model_dir: str) -> None:
    lines: list[str] = []

    async def body() -> tuple[list[FinishedGroup], Any]:
        async with (
            shared_cluster(engines=1) as client,
            Rollout(
                client,
                env=never_says_the_same,
                model=model_dir,
                engines=emulated(model_dir),
                progress=lines.append,
            ) as rolled,
        ):
            stream = rolled.stream_groups(source(never_says_the_same, "odd"), PLAN)
            groups = []
            for batch in (1, 2):
                stream.open_batches(batch)
                groups.append(await anext(stream))
            await stream.aclose()
            return groups, stream.dropped_groups

    begun.clear()
    groups, dropped = run(body())
    assert dropped == {"prefix": 1}
    assert [group.group_id for group in groups] == ["g000000", "g000000c1.1"], "the task is asked again from scratch"
    assert all(PREFIX not in record.metadata for group in groups for record in group.records)
    (line,) = (line for line in lines if line.startswith("prefix sampling: "))
    assert line.startswith("prefix sampling: groups of odd begin from scratch: before step 1 the context differs from")
