"""The agent's context against a scripted control plane: no cluster, every way a step or action can come back."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
from worlds.scripted_plane import NEVER, ScriptedPlane, context_on, lost, sampled

from heddle_dask.core.errors import BadInput
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.engines.contract import VersionSpan
from heddle_dask.environments.base import ActionFailed
from heddle_dask.live.driver.connection.submission import Interrupted
from heddle_dask.live.driver.options import Budget, Sampling
from heddle_dask.live.driver.programs.branch import Recorded, ReplayDiverged
from heddle_dask.live.driver.programs.context import LiveContext
from heddle_dask.live.driver.programs.steps import BudgetExhausted, StepLost
from heddle_dask.live.wire.messages import ActionOutcome, StepResult
from heddle_dask.records.token_record import Attribution


def test_a_step_keeps_what_was_sampled_and_masks_the_rest(model_dir: str) -> None:
    plane = ScriptedPlane(sampled(65, 66), sampled(67))
    ctx = context_on(plane, model_dir)

    async def body() -> None:
        ctx.append("system", "sys")
        ctx.append("user", "hello")
        reply = await ctx.generate()
        assert (reply.token_ids, reply.finish_reason) == ((65, 66), "length")
        ctx.append("tool", "observed")
        await ctx.generate()

    asyncio.run(body())
    record = ctx.record
    assert plane.seen[0] == record.token_ids[: ctx.steps[0].token_start].tolist()
    assert plane.seen[1] == record.token_ids[: ctx.steps[1].token_start].tolist()
    assert record.token_ids[record.loss_mask].tolist() == [65, 66, 67]
    order = [segment.attribution for segment in record.segments()]
    prompt, tool, template = Attribution.PROMPT, Attribution.TOOL, Attribution.TEMPLATE
    assert order == [
        *(template, prompt, template, prompt, template, Attribution.POLICY),
        *(template, tool, template, Attribution.POLICY),
    ]
    # The second step brings only what follows the first one's answer.
    held = ctx.steps[0].token_stop
    assert plane.calls[1].base_tokens == held
    assert len(plane.calls[1].delta) == 4 * (ctx.steps[1].token_start - held)


def test_a_preempted_step_goes_on_from_its_tokens_as_one_step(model_dir: str) -> None:
    plane = ScriptedPlane(
        sampled(65, 66, status="aborted", reason="abort", cached_tokens=3),
        sampled(67, status="aborted", reason="abort", engine_id="e2"),
        sampled(68, 69, reason="stop", engine_id="e2"),
    )
    ctx = context_on(plane, model_dir)

    async def body() -> Any:
        ctx.append("user", "hello")
        return await ctx.generate(max_tokens=10)

    reply = asyncio.run(body())
    assert reply.token_ids == (65, 66, 67, 68, 69)
    assert reply.finish_reason == "stop"
    assert [call.sampling.max_tokens for call in plane.calls] == [10, 8, 7]
    assert [call.step_id.attempt for call in plane.calls] == [0, 1, 2]
    assert len({call.sampling.seed for call in plane.calls}) == 3, "a part must not repeat the draws of the one before"
    (step,) = ctx.steps
    assert (step.preemptions, step.migrations, step.generated_tokens) == (2, 1, 5)
    assert step.cached_tokens == 3
    assert step.decode_s == pytest.approx(0.6)


def test_a_step_has_a_seed_only_where_the_user_asked_for_it(model_dir: str) -> None:
    seeds: dict[bool, list[int | None]] = {}
    for seeded in (False, True):
        plane = ScriptedPlane(sampled(65, 66, reason="stop"), sampled(67, reason="stop"))
        ctx = context_on(plane, model_dir, sampling=Sampling(seeded=seeded))

        async def body(ctx: LiveContext = ctx) -> None:
            for _ in range(2):
                ctx.append("user", "hello")
                await ctx.generate(max_tokens=10)

        asyncio.run(body())
        seeds[seeded] = [call.sampling.seed for call in plane.calls]
    assert Sampling() == Sampling(seeded=False)
    assert seeds[False] == [None, None], "vLLM samples request by request where they have seeds"
    assert len(set(seeds[True])) == 2 and None not in seeds[True]


def test_a_step_preempted_at_its_last_token_is_finished(model_dir: str) -> None:
    plane = ScriptedPlane(sampled(65, 66, status="aborted", reason="abort"))
    ctx = context_on(plane, model_dir)

    async def body() -> Any:
        ctx.append("user", "hello")
        return await ctx.generate(max_tokens=2)

    assert asyncio.run(body()).finish_reason == "length"
    assert plane.script == []


@pytest.mark.parametrize("status", ["engine-lost", "context-missing"])
def test_a_lost_step_is_asked_for_again_with_the_whole_context(status: str, model_dir: str) -> None:
    plane = ScriptedPlane(sampled(65), lost(status), lost(status), sampled(66), sampled(67))
    ctx = context_on(plane, model_dir)

    async def body() -> None:
        ctx.append("user", "hello")
        await ctx.generate()
        ctx.append("tool", "x")
        await ctx.generate()
        await ctx.generate()

    asyncio.run(body())
    assert [call.base_tokens > 0 for call in plane.calls] == [False, True, False, False, True]
    assert plane.seen[1] == plane.seen[2] == plane.seen[3]
    assert [call.step_id.attempt for call in plane.calls[1:4]] == [0, 1, 2]
    assert len({call.key for call in plane.calls}) == 5


def test_a_result_that_died_with_its_worker_is_sampled_again(model_dir: str) -> None:
    plane = ScriptedPlane(Interrupted("result-lost", "gone"), sampled(65))
    ctx = context_on(plane, model_dir)
    ctx.append("user", "hello")
    assert asyncio.run(ctx.generate()).token_ids == (65,)


@pytest.mark.parametrize(
    "answer",
    [
        Interrupted("given-up", "its worker died 4 times"),
        lambda call, context: StepResult(status="refused", message="its worker died 4 times"),
    ],
)
def test_a_refused_step_is_lost_with_its_reason(answer: Any, model_dir: str) -> None:
    ctx = context_on(ScriptedPlane(answer), model_dir)
    ctx.append("user", "hello")
    with pytest.raises(StepLost, match="step 0: its worker died 4 times"):
        asyncio.run(ctx.generate())


def test_budgets_stop_the_program(model_dir: str) -> None:
    plane = ScriptedPlane(sampled(65), sampled(66))
    ctx = context_on(plane, model_dir, budget=Budget(max_steps=2))

    async def body() -> None:
        ctx.append("user", "hello")
        assert not ctx.done
        await ctx.generate()
        await ctx.generate()
        assert not ctx.was_stopped
        assert ctx.done and ctx.was_stopped
        with pytest.raises(BudgetExhausted, match="it used its 2 steps"):
            await ctx.generate()

    asyncio.run(body())


def test_the_context_limit_bounds_the_step_and_then_the_program(model_dir: str) -> None:
    plane = ScriptedPlane(sampled(*[65] * 8))
    ctx = context_on(plane, model_dir, budget=Budget(max_context_tokens=20, max_step_tokens=100))

    async def body() -> None:
        ctx.append_tokens(range(65, 77))
        await ctx.generate()
        assert plane.calls[0].sampling.max_tokens == 8
        with pytest.raises(BudgetExhausted, match="20 tokens fills the limit of 20"):
            await ctx.generate()

    asyncio.run(body())


def test_versions_of_one_step_are_kept_per_token(model_dir: str) -> None:
    plane = ScriptedPlane(sampled(65, 66, 67, version_spans=(VersionSpan(4, 0, 2), VersionSpan(5, 2, 3))))
    ctx = context_on(plane, model_dir)
    ctx.append_tokens([1, 2])
    asyncio.run(ctx.generate())
    assert ctx.record.policy_version.tolist() == [-1, -1, 4, 4, 5]


def test_actions_return_values_and_raise_what_failed(model_dir: str) -> None:
    plane = ScriptedPlane()
    ctx = context_on(plane, model_dir)

    async def body() -> None:
        assert await ctx.call(max, 3, 9) == 9
        plane.outcomes = [ActionOutcome("raised", message="ValueError: no", detail="Traceback…")]
        with pytest.raises(ActionFailed, match="action max raised: ValueError: no") as failed:
            await ctx.call(max, 3, 9)
        assert (failed.value.cause, failed.value.detail) == ("raised", "Traceback…")
        with pytest.raises(BadInput, match=r"needs: cpus is \(3, 2\)"):
            await ctx.call(max, 1, 2, cpus=(3, 2))

    asyncio.run(body())
    assert [(a.label, a.status) for a in ctx.actions] == [("max", "ok"), ("max", "raised")]


def test_an_action_whose_model_service_died_runs_again_and_is_lost_in_the_end(model_dir: str) -> None:
    died = ActionOutcome("lost", message="service rm does not answer")
    plane = ScriptedPlane()
    ctx = context_on(plane, model_dir, retries=RetryPolicy(max_action_attempts=2))
    plane.outcomes = [died]
    assert asyncio.run(ctx.call(max, 1, 2)) == 2
    assert plane.action_ids == ["t/a0", "t/a0~1"]
    assert len(set(plane.idempotency_keys)) == 1
    plane.outcomes = [died, died]
    with pytest.raises(ActionFailed, match="action max lost: service rm does not answer"):
        asyncio.run(ctx.call(max, 1, 2))


def test_an_action_whose_result_was_lost_runs_again_under_another_id(model_dir: str) -> None:
    plane = ScriptedPlane()
    plane.outcomes = [Interrupted("result-lost", "gone")]
    ctx = context_on(plane, model_dir)
    assert asyncio.run(ctx.call(max, 1, 2)) == 2
    assert plane.action_ids == ["t/a0", "t/a0~1"]
    assert plane.idempotency_keys[0] == plane.idempotency_keys[1]
    plane.outcomes = [Interrupted("given-up", "it needs 9 CPUs")]
    with pytest.raises(ActionFailed, match="action max lost: it needs 9 CPUs"):
        asyncio.run(ctx.call(max, 1, 2))


async def impatient(ctx: LiveContext) -> list[Any]:
    ctx.append("user", "hello")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await ctx.generate(max_tokens=4)
    ctx.append("user", "shorter")
    first = await ctx.generate(max_tokens=2)
    value = await ctx.call(abs, -3)
    second = await ctx.generate(max_tokens=1)
    return [first.token_ids, value, second.token_ids]


def test_a_step_that_is_given_up_leaves_no_token_and_a_prompt_that_is_well_formed(model_dir: str) -> None:
    """It was preempted once, then no answer came; a resumed program gives up again what it gave up then."""
    script = (sampled(65, status="aborted", reason="abort"), NEVER, sampled(66, 67), sampled(68))
    journal: list[Any] = []
    plane = ScriptedPlane(*script)
    whole = context_on(plane, model_dir, journal=journal)
    expected = asyncio.run(impatient(whole))
    assert [kind for kind, _ in journal] == ["step", "step-cancelled", "step", "action", "step"]
    assert whole.record.token_ids[whole.record.loss_mask].tolist() == [66, 67, 68]
    assert whole.generated_tokens == 3
    assert [call.step_id[1:] for call in plane.calls] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    prompt = whole._services.template.decode(plane.seen[2])
    assert prompt.count("<|im_start|>") == prompt.count("<|im_end|>") + 1, "only the policy's turn is open"
    for frontier in range(len(journal) + 1):
        recorded = Recorded()
        for kind, body in journal[:frontier]:
            if kind == "step":
                recorded.steps.append(body)
            elif kind == "step-cancelled":
                recorded.cancel(body["step_index"])
            else:
                recorded.actions[body["action_index"]] = body
        rest = [answer for answer, line in zip(script, (0, 1, 2, 4), strict=True) if line >= frontier]
        again: list[Any] = []
        plane = ScriptedPlane(*rest)
        ctx = context_on(plane, model_dir, recorded=recorded, journal=again)
        assert asyncio.run(impatient(ctx)) == expected
        assert plane.script == []
        assert again == journal[frontier:], "what the journal holds is not written twice"
        assert ctx.record.token_ids.tolist() == whole.record.token_ids.tolist()


def test_a_step_whose_run_is_interrupted_was_not_given_up(model_dir: str) -> None:
    journal: list[Any] = []
    ctx = context_on(ScriptedPlane(NEVER), model_dir, journal=journal)

    async def body() -> None:
        ctx.append("user", "hello")
        step = asyncio.ensure_future(ctx.generate())
        await asyncio.sleep(0)
        ctx.interrupt()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step

    asyncio.run(body())
    assert journal == []


def test_steps_that_were_given_up_are_not_counted_as_lost(model_dir: str) -> None:
    ctx = context_on(ScriptedPlane(*[NEVER] * 40, lost("engine-lost"), sampled(65)), model_dir)

    async def body() -> None:
        ctx.append("user", "hello")
        for _ in range(40):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await ctx.generate(max_tokens=1)
        assert (await ctx.generate(max_tokens=1)).token_ids == (65,)

    asyncio.run(body())


async def program(ctx: LiveContext) -> list[Any]:
    ctx.append("user", "hello")
    first = await ctx.generate(max_tokens=4)
    both = await asyncio.gather(ctx.call(max, 1, 2), ctx.call(min, 1, 2))
    ctx.append("tool", str(both))
    second = await ctx.generate(max_tokens=4)
    return [first.token_ids, both, second.token_ids, await ctx.call(abs, -3)]


def test_a_resumed_program_is_fed_its_journal_and_asks_only_beyond_it(model_dir: str) -> None:
    script = (
        sampled(65, status="aborted", reason="abort"),
        sampled(66, reason="stop"),
        lost("engine-lost"),
        sampled(67),
    )
    journal: list[Any] = []
    whole = context_on(ScriptedPlane(*script), model_dir, journal=journal)
    expected = asyncio.run(program(whole))
    assert [kind for kind, _ in journal] == ["step", "step", "action", "action", "step", "action"]
    for frontier in range(len(journal) + 1):
        recorded = Recorded()
        for kind, body in journal[:frontier]:
            if kind == "step":
                recorded.steps.append(body)
            else:
                recorded.actions[body["action_index"]] = body
        rest = [answer for answer, line in zip((script[0], script[1], script[3]), (0, 1, 4), strict=True)]
        rest = [answer for answer, line in zip(rest, (0, 1, 4), strict=True) if line >= frontier]
        plane = ScriptedPlane(*rest)
        ctx = context_on(plane, model_dir, recorded=recorded)
        assert asyncio.run(program(ctx)) == expected
        assert plane.script == []
        assert ctx.record.token_ids.tolist() == whole.record.token_ids.tolist()
        assert len(plane.action_ids) == sum(line >= frontier for line in (2, 3, 5))
    recorded = Recorded(
        deque(body for kind, body in journal if kind == "step"),
        {body["action_index"]: body for kind, body in journal if kind == "action"},
    )
    assert recorded.generated_tokens == whole.generated_tokens == 3
    first_context = journal[0][1]["context_tokens"]
    assert recorded.observed_tokens == journal[4][1]["context_tokens"] - first_context - 2
    assert recorded.tools_s == sum(action.run_s for action in whole.actions)


def test_a_resumed_program_that_asks_for_something_else_is_told(model_dir: str) -> None:
    journal: list[Any] = []
    ctx = context_on(ScriptedPlane(sampled(65)), model_dir, journal=journal)
    ctx.append("user", "hello")
    asyncio.run(ctx.generate())
    recorded = Recorded()
    recorded.steps.extend(body for _, body in journal)
    other = context_on(ScriptedPlane(), model_dir, recorded=recorded)
    other.append("user", "something longer")
    with pytest.raises(ReplayDiverged, match="the journal holds step 0 over"):
        asyncio.run(other.generate())


def test_a_resumed_program_whose_context_has_other_tokens_of_the_same_number_is_told(model_dir: str) -> None:
    journal: list[Any] = []
    ctx = context_on(ScriptedPlane(sampled(65)), model_dir, journal=journal)
    ctx.append_tokens([1, 2, 3])
    asyncio.run(ctx.generate())
    recorded = Recorded()
    recorded.steps.extend(body for _, body in journal)
    other = context_on(ScriptedPlane(), model_dir, recorded=recorded)
    other.append_tokens([1, 2, 4])
    with pytest.raises(ReplayDiverged, match="over 3 tokens; the journal holds step 0 over 3 other ones"):
        asyncio.run(other.generate())


@dataclass(frozen=True)
class Found:
    """A value of a tool that is no plain data."""

    rows: tuple[int, ...]


def test_a_resumed_program_gets_equal_values_and_makes_a_call_again_that_cannot_be_replayed(
    model_dir: str,
) -> None:
    async def body(ctx: LiveContext) -> list[Any]:
        return [await ctx.call(Found, (1, 2)), await ctx.call(dict, a=(1, {2}), label="plain")]

    journal: list[Any] = []
    plane = ScriptedPlane()
    expected = asyncio.run(body(context_on(plane, model_dir, journal=journal)))
    assert expected == [Found((1, 2)), {"a": (1, {2})}]
    first_key = plane.idempotency_keys[0]
    lines = [json.loads(json.dumps(line)) for _, line in journal]
    assert "pickled" in lines[0] and "pickled" not in lines[1]

    plane = ScriptedPlane()
    recorded = Recorded(actions={line["action_index"]: line for line in lines})
    assert asyncio.run(body(context_on(plane, model_dir, recorded=recorded))) == expected
    assert plane.action_ids == []

    again: list[Any] = []
    recorded = Recorded(actions={1: lines[1]}, idempotency_keys={0: "of the first session"})
    ctx = context_on(plane, model_dir, recorded=recorded, journal=again)
    assert asyncio.run(body(ctx)) == expected
    assert plane.idempotency_keys == ["of the first session"] != [first_key]
    assert [line["action_index"] for _, line in again] == [0]
    assert [action.status for action in ctx.actions] == ["ok", "ok"]


def test_a_step_is_asked_for_as_often_as_the_retry_policy_says(model_dir: str) -> None:
    lost = [Interrupted("result-lost", "gone")] * 3
    ctx = context_on(ScriptedPlane(*lost[:2], sampled(65)), model_dir, retries=RetryPolicy(max_step_attempts=3))
    ctx.append("user", "hello")
    assert asyncio.run(ctx.generate()).token_ids == (65,)
    ctx = context_on(ScriptedPlane(*lost, sampled(65)), model_dir, retries=RetryPolicy(max_step_attempts=3))
    ctx.append("user", "hello")
    with pytest.raises(StepLost, match="step 0 was lost 3 times"):
        asyncio.run(ctx.generate())
