"""A context that goes on behind the prefix of another attempt, against a scripted control plane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from worlds.record_builders import plain_trajectory
from worlds.scripted_plane import ScriptedPlane, context_on, sampled

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import GroupId, TrajectoryId
from heddle_dask.core.nouns import TrajectorySpec
from heddle_dask.engines.vllm_command import VllmOptions
from heddle_dask.environments.base import Context, Task
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.rewards import RewardContext, Transcript
from heddle_dask.environments.splits import prompt_key
from heddle_dask.environments.task_sources import EnvironmentSource
from heddle_dask.live.driver.files.continuation import task_list
from heddle_dask.live.driver.inputs.rollout_inputs import prefixes_of
from heddle_dask.live.driver.options import Engines
from heddle_dask.live.driver.programs.attempts import Attempt
from heddle_dask.live.driver.programs.context import LiveContext
from heddle_dask.live.driver.programs.prefix_replay import PrefixDiverged
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.driver.runs.endings import EnvironmentFailures
from heddle_dask.live.driver.runs.program_runs import ProgramRuns
from heddle_dask.records.token_record import Attribution
from heddle_dask.records.trajectory_prefix import TrajectoryPrefix
from heddle_dask.training.groups import GroupPlan
from heddle_dask.training.prefix_sampling import PrefixRule

REPLIES = (sampled(65, 66), sampled(67), sampled(68, 69), sampled(70))


def answer(number: int) -> str:
    return f"tool {number}"


def other_answer(number: int) -> str:
    return f"tool {number}" if number == 0 else f"another {number}"


async def program(ctx: Context, steps: int = 4, tool: Callable[[int], str] = answer) -> list[str]:
    """Steps with a call after each; what the replies were."""
    ctx.append("user", f"task {ctx.seed}")
    texts = []
    for number in range(steps):
        reply = await ctx.generate()
        assert reply.step_index == number and reply.context is ctx
        texts.append(reply.text)
        ctx.append("tool", await ctx.call(tool, number))
    return texts


@pytest.fixture(scope="module")
def source(model_dir: str) -> tuple[LiveContext, TrajectoryPrefix]:
    ctx = context_on(ScriptedPlane(*REPLIES), model_dir)
    asyncio.run(program(ctx))
    facts = {"trajectory_id": "t/9", "seed": 7, "branches": (ctx.finished_record,), "steps": tuple(ctx.steps)}
    return ctx, TrajectoryPrefix.of(replace(plain_trajectory(0), **facts), 2)


def test_replayed_tokens_are_exact_and_masked_and_calls_run_again(
    model_dir: str, source: tuple[LiveContext, TrajectoryPrefix]
) -> None:
    before, prefix = source
    plane, journal = ScriptedPlane(sampled(80), sampled(81)), []
    ctx = context_on(plane, model_dir, prefix=prefix, journal=journal)
    texts = asyncio.run(program(ctx))
    ctx.check_prefix()
    ids = ctx.record.token_ids
    assert ids[: len(prefix.token_ids)].tolist() == prefix.token_ids.tolist()
    assert plane.seen[0] == prefix.token_ids.tolist(), "the engine has the recorded context"
    assert ids[ctx.record.loss_mask].tolist() == [80, 81]
    replayed = ctx.record.attribution == Attribution.PREFIX
    assert ids[replayed].tolist() == [65, 66, 67]
    assert np.isnan(ctx.record.logprobs[replayed]).all() and (ctx.record.policy_version[replayed] == -1).all()
    others = before.record.attribution[: len(prefix.token_ids)]
    assert np.where(others == Attribution.POLICY, Attribution.PREFIX, others).tolist() == [
        *ctx.record.attribution[: len(prefix.token_ids)].tolist()
    ], "all other authors are as they were"
    assert [step.step_index for step in ctx.steps] == [2, 3] and ctx.generated_tokens == 2
    assert [call.step_id.step_index for call in plane.calls] == [2, 3]
    assert len(plane.actions) == 4, "the calls of the prefix have run again"
    assert [kind for kind, _ in journal] == ["action", "action", "step", "action", "step", "action"]
    texts_of, _ = ctx.transcript_texts()
    assert list(texts_of) == texts and len(texts) == 4
    # A fork after it is one of this trajectory.
    fork = ctx.fork(after_step=2)
    assert fork.record.token_ids.tolist() == ids[: ctx.steps[0].token_stop].tolist()


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (lambda ctx: program(ctx, tool=other_answer), "before step 2 the context differs from that of t/9 at token"),
        (lambda ctx: program(ctx, steps=2), "it ended after 2 of 2 recorded steps"),
        (lambda ctx: program(ctx, steps=1), "it ended after 1 of 2 recorded steps"),
        (lambda ctx: _continuations(ctx), "step 0 asks for 2 continuations"),
        (lambda ctx: _fork(ctx), "it forks before the end of its prefix"),
        (lambda ctx: ctx.gateway(), "its agent asks through a gateway"),
    ],
)
def test_what_differs_from_the_recorded_attempt_is_refused(
    model_dir: str, source: tuple[LiveContext, TrajectoryPrefix], agent: Any, said: str
) -> None:
    ctx = context_on(ScriptedPlane(), model_dir, prefix=source[1])

    async def body() -> None:
        await agent(ctx)
        ctx.check_prefix()

    with pytest.raises(PrefixDiverged, match=said):
        asyncio.run(body())
    assert ctx.steps == [] and ctx.generated_tokens == 0


def test_prefixes_are_checked_against_their_tasks(source: tuple[LiveContext, TrajectoryPrefix]) -> None:
    task = Task("a", "one")
    environment = FunctionEnvironment(program, name="env", tasks=lambda count, seed: [task])
    prefix = replace(source[1], prompt_key=prompt_key("env", task))
    assert prefixes_of({"a": prefix}, environment, [task]) == {"a": prefix} and prefixes_of(None, environment, []) == {}
    refused = [
        ({"b": prefix}, "prefixes: 'b': use a task id of this run"),
        ({"a": None}, r"TrajectoryPrefix.of\(record, steps\)"),
        ({"a": source[1]}, "t/9 attempted another task"),
    ]
    for prefixes, said in refused:
        with pytest.raises(BadInput, match=said):
            prefixes_of(prefixes, environment, [task])
    environment.can_replay = False  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match="'env' says that it cannot be replayed"):
        prefixes_of({"a": prefix}, environment, [task])
    # A batch is resumed with the same prefixes only.
    assert task_list([task], {"a": prefix}) != task_list([task]) == task_list([task], {})


class Rewarded(FunctionEnvironment):
    async def solve(self, task: Task, ctx: Context) -> None:
        await program(ctx)

    async def reward(self, task: Task, transcript: Transcript, ctx: RewardContext) -> float:
        return float(ctx.seed)


def test_a_reward_hook_has_the_seed_of_the_environment(
    model_dir: str, source: tuple[LiveContext, TrajectoryPrefix]
) -> None:
    environment = Rewarded(program, name="env")
    services = context_on(ScriptedPlane(sampled(80), sampled(81)), model_dir)._services
    failures = EnvironmentFailures(services.retries)
    runs = ProgramRuns(Mock(status="closed"), services, Mock(wait=AsyncMock()), failures, retry_lost_tools=False)
    attempt = Attempt(Task("a", "one"), TrajectorySpec(TrajectoryId("t"), GroupId("g")), 8, environment, "t")
    record = asyncio.run(runs.run(attempt.behind(source[1]))).record
    assert (record.detail, record.reward, record.seed) == ("", source[1].seed, 8)


def test_engines_that_read_calls_are_refused(model_dir: str, source: tuple[LiveContext, TrajectoryPrefix]) -> None:
    task = Task("a", "one")
    environment = FunctionEnvironment(program, name="env", tasks=lambda count, seed: [task])
    engines = Engines(options=VllmOptions(extra_args=("--tool-call-parser=hermes",)))
    rollout = Rollout(Mock(asynchronous=True), env=environment, model=model_dir, engines=engines)
    plan = GroupPlan(2, prefixes=PrefixRule())
    with pytest.raises(BadInput, match="where engines read calls of tools"):
        rollout.stream_groups(EnvironmentSource(environment, 1), plan)
    assert rollout.stream_groups(EnvironmentSource(environment, 1), replace(plan, prefixes=None))
    prefix = replace(source[1], prompt_key=prompt_key("env", task))
    with pytest.raises(BadInput, match="where engines read calls of tools"):
        asyncio.run(rollout.run([task], prefixes={"a": prefix}))


async def _continuations(ctx: Context) -> None:
    ctx.append("user", f"task {ctx.seed}")
    await ctx.generate(n=2)


async def _fork(ctx: Context) -> None:
    ctx.append("user", f"task {ctx.seed}")
    await ctx.generate()
    ctx.fork()
