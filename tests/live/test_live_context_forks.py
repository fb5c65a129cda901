"""Forks of a context: one history, two continuations, each with its steps, its tools and its record."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any

import pytest
from worlds.scripted_plane import NEVER, ScriptedPlane, context_on, lost, sampled

from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.files.resume import recorded_results
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.driver.programs.context import LiveContext
from heddle_dask.live.driver.programs.steps import BudgetExhausted, StepLost
from heddle_dask.records.token_record import Attribution


async def forking(ctx: LiveContext) -> list[LiveContext]:
    """One step, two forks of it that run side by side, and a fork of the second."""
    ctx.append("user", "hello")
    await ctx.generate()
    ctx.append("user", "and now?")
    forks = [ctx.fork(), ctx.fork()]
    await asyncio.gather(*(fork.generate() for fork in forks))
    assert await forks[1].call(max, 1, 2) == 2
    forks[1].append("tool", "2")
    inner = forks[1].fork()
    await inner.generate()
    await ctx.generate()
    return [ctx, forks[0], forks[1], inner]


def answers() -> ScriptedPlane:
    return ScriptedPlane(*(sampled(65 + n) for n in range(5)))


def test_a_fork_goes_on_from_the_same_history(model_dir: str) -> None:
    plane = answers()
    ctx = context_on(plane, model_dir)
    contexts = asyncio.run(forking(ctx))
    assert list(ctx.branches()) == contexts
    first, second, third = plane.seen[1], plane.seen[2], plane.seen[4]
    assert first == second == third, "the forks and the trajectory itself have asked over the same tokens"
    assert [call.step_id for call in plane.calls] == [
        ("t", 0, 0),
        ("t#1", 1, 0),
        ("t#2", 1, 0),
        ("t#2#1", 2, 0),
        ("t", 1, 0),
    ]
    assert len({call.sampling.seed for call in plane.calls}) == 5, "branches draw differently"
    assert plane.forked == [("t#1", "t"), ("t#2", "t"), ("t#2#1", "t")]
    assert plane.action_ids == ["t#2/a0"]
    assert ctx.metadata is contexts[3].metadata


def test_what_branches_share_is_in_the_loss_once(model_dir: str) -> None:
    ctx = context_on(answers(), model_dir)
    contexts = asyncio.run(forking(ctx))
    sampled_ids = [c.record.token_ids[c.record.loss_mask].tolist() for c in contexts]
    assert sampled_ids == [[65, 69], [66], [67], [68]]
    assert ctx.generated_tokens == 5
    for fork in contexts[1:]:
        (start, *_) = fork.record.segments()
        assert start.attribution is Attribution.SHARED
        shared = start.stop
        assert fork.steps[0].token_start >= shared
    root, one = ctx.record.token_ids, contexts[1].record.token_ids
    common = next(contexts[1].record.segments()).stop
    assert root[:common].tolist() == one[:common].tolist()


def test_a_fork_counts_the_steps_before_it(model_dir: str) -> None:
    ctx = context_on(answers(), model_dir, budget=Budget(max_steps=2))

    async def body() -> None:
        ctx.append("user", "hello")
        await ctx.generate()
        fork = ctx.fork()
        await fork.generate()
        assert fork.done and not ctx.done
        with pytest.raises(BudgetExhausted, match="its 2 steps"):
            await fork.generate()
        assert ctx.was_stopped
        await ctx.generate()

    asyncio.run(body())


def test_a_context_is_not_forked_in_a_step_nor_after_its_end(model_dir: str) -> None:
    plane = ScriptedPlane(sampled(65), NEVER)
    journal: list[Any] = []
    ctx = context_on(plane, model_dir, journal=journal)

    async def body() -> None:
        ctx.append("user", "hello")
        await ctx.generate()
        fork = ctx.fork()
        left_running = asyncio.ensure_future(fork.generate())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match=r"fork\(\) while the step before is awaited"):
            fork.fork()
        ctx.end()
        for after in (ctx.fork, fork.fork):
            with pytest.raises(RuntimeError, match=r"fork\(\) after the program has ended"):
                after()
        with pytest.raises(RuntimeError, match=r"generate\(\) after the program has ended"):
            await ctx.generate()
        with pytest.raises(RuntimeError, match=r"call\(\) after the program has ended"):
            await ctx.call(max, 1, 2)
        assert len(fork.finished_record) == len(fork.record)
        await asyncio.wait([left_running])
        assert left_running.cancelled(), "nothing waits for a step after the end"
        assert [kind for kind, _ in journal] == ["step"], "it is not the program that has cancelled it"

    asyncio.run(body())


def test_a_fork_without_a_request_is_not_announced(model_dir: str) -> None:
    plane = ScriptedPlane(sampled(65))
    ctx = context_on(plane, model_dir)
    ctx.append("user", "hello")
    idle, busy = ctx.fork(), ctx.fork()
    asyncio.run(busy.generate())
    assert [branch.announced for branch in (ctx, idle, busy)] == ["t", None, "t#2"]
    assert plane.forked == [("t#2", "t")]


def test_a_resumed_program_finds_the_results_of_its_branches(model_dir: str) -> None:
    """Whatever part of the journal there is: what it holds is not asked for again, and the records are the same."""
    journal: list[Any] = []
    whole = asyncio.run(forking(context_on(answers(), model_dir, journal=journal)))
    assert [body["trajectory_id"] for _, body in journal] == ["t"] * 6
    for kept in range(len(journal) + 1):
        (recorded,) = recorded_results(journal[:kept]).values() if kept else [None]
        lines: list[Any] = []
        plane = ScriptedPlane(*(sampled(65 + n) for n in range(kept_steps(journal[:kept]), 5)))
        ctx = context_on(plane, model_dir, recorded=recorded, journal=lines)
        again = asyncio.run(forking(ctx))
        assert [c.record for c in again] == [c.record for c in whole]
        assert len(lines) == len(journal) - kept
        assert plane.script == []


def kept_steps(journal: list[Any]) -> int:
    return sum(kind == "step" for kind, _ in journal)


async def best_of_three(ctx: LiveContext) -> list[LiveContext]:
    """A step with three continuations, of which the second goes on, with two."""
    ctx.append("user", "hello")
    first = await ctx.generate(n=3, max_tokens=5)
    best = first.alternatives[0].context
    best.append("user", "and now?")
    second = await best.generate(n=2)
    assert second.context is best
    await second.alternatives[0].context.generate()
    return list(ctx.branches())


def test_continuations_are_sampled_side_by_side_each_in_a_context_of_its_own(model_dir: str) -> None:
    plane = ScriptedPlane(sampled(65), sampled(66), sampled(67))
    ctx = context_on(plane, model_dir)
    ctx.append("user", "hello")
    reply = asyncio.run(ctx.generate(n=3, max_tokens=5))
    replies = [reply, *reply.alternatives]
    assert [each.token_ids for each in replies] == [(65,), (66,), (67,)]
    assert [each.alternatives for each in replies[1:]] == [(), ()]
    assert reply.context is ctx
    assert [each.context for each in replies] == list(ctx.branches())
    assert [call.step_id for call in plane.calls] == [("t", 0, 0), ("t#1", 0, 0), ("t#2", 0, 0)]
    assert plane.seen[0] == plane.seen[1] == plane.seen[2]
    assert {call.sampling.max_tokens for call in plane.calls} == {5}
    assert len({call.sampling.seed for call in plane.calls}) == 3
    for branch, ids in zip(ctx.branches(), (65, 66, 67), strict=True):
        assert branch.record.token_ids[branch.record.loss_mask].tolist() == [ids]
        assert [step.generated_tokens for step in branch.steps] == [1]


def test_a_seed_that_is_given_differs_by_continuation(model_dir: str) -> None:
    plane = ScriptedPlane(*[sampled(65)] * 3)
    ctx = context_on(plane, model_dir)
    ctx.append("user", "hello")
    asyncio.run(ctx.generate(n=3, seed=2**63 - 2))
    assert [call.sampling.seed for call in plane.calls] == [2**63 - 2, 2**63 - 1, 0]


def test_continuations_are_sampled_at_the_same_time(model_dir: str) -> None:
    plane = ScriptedPlane(*[NEVER] * 3)
    ctx = context_on(plane, model_dir)
    ctx.append("user", "hello")

    async def body() -> None:
        asked = asyncio.ensure_future(ctx.generate(n=3))
        while len(plane.calls) < 3:
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match=r"generate\(\) while the step before is awaited"):
            await ctx.generate()
        ctx.end()
        await asyncio.wait([asked])
        assert asked.cancelled()
        assert len(asyncio.all_tasks()) == 1, "all that it waited for has ended"

    asyncio.run(body())


def test_a_reply_may_be_an_argument_of_a_tool(model_dir: str) -> None:
    """Its context stays in the driver."""
    plane = ScriptedPlane(sampled(65), sampled(66))
    ctx = context_on(plane, model_dir)
    ctx.append("user", "hello")

    async def body() -> None:
        reply = await ctx.generate(n=2)
        sent = pickle.loads(pickle.dumps(reply))
        assert [r.token_ids for r in (sent, *sent.alternatives)] == [(65,), (66,)]
        assert sent.finish_reason == reply.finish_reason
        assert (sent.context, sent.alternatives[0].context) == (None, None)
        assert (await ctx.call(copy.copy, reply)).token_ids == (65,)

    asyncio.run(body())


@pytest.mark.parametrize("asked", [{"top_p": 2.0}, {"stop": [""]}])
def test_continuations_that_are_refused_leave_no_fork(asked: dict[str, Any], model_dir: str) -> None:
    ctx = context_on(ScriptedPlane(sampled(65)), model_dir, budget=Budget(max_steps=1))
    ctx.append("user", "hello")

    async def body() -> None:
        with pytest.raises(BadInput):
            await ctx.generate(n=4, **asked)
        await ctx.generate()
        with pytest.raises(BudgetExhausted):
            await ctx.generate(n=4)

    asyncio.run(body())
    assert list(ctx.branches()) == [ctx]


def resumed_from_everywhere(program: Any, script: list[Any], model_dir: str) -> tuple[list[Any], ScriptedPlane]:
    """Run a program, and again from each part of its journal; the journal and the plane of the first run."""
    journal: list[Any] = []
    plane = ScriptedPlane(*script)
    whole = asyncio.run(program(context_on(plane, model_dir, journal=journal)))
    for kept in range(len(journal) + 1):
        (recorded,) = recorded_results(journal[:kept]).values() if kept else [None]
        answers = {(call.step_id, call.sampling.seed): answer for call, answer in zip(plane.calls, script, strict=True)}
        again = AnswersByStep(answers)
        ctx = context_on(again, model_dir, recorded=recorded)
        assert [c.record for c in asyncio.run(program(ctx))] == [c.record for c in whole], kept
    return journal, plane


class AnswersByStep(ScriptedPlane):
    """Answers each request as it was answered in another run, whatever is asked before it."""

    def __init__(self, answers: dict[Any, Any]) -> None:
        super().__init__()
        self.answers = answers

    async def step(self, call: Any, request: Any) -> Any:
        self.script = [self.answers[call.step_id, call.sampling.seed]]
        return await super().step(call, request)


def test_a_resumed_program_finds_its_continuations(model_dir: str) -> None:
    journal, plane = resumed_from_everywhere(best_of_three, [sampled(65 + n) for n in range(6)], model_dir)
    assert [body.get("branch", "") for _, body in journal] == ["", "#1", "#2", "#1", "#1#1", "#1#1"]
    assert [call.step_id for call in plane.calls][3:] == [("t#1", 1, 0), ("t#1#1", 1, 0), ("t#1#1", 2, 0)]


async def cancelling(ctx: LiveContext) -> list[LiveContext]:
    """Two continuations have ended when the program cancels all three; then it asks for one."""
    ctx.append("user", "hello")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await ctx.generate(n=3)
    assert [step for branch in ctx.branches() for step in branch.steps] == []
    assert ctx.generated_tokens == 0
    assert len(asyncio.all_tasks()) == 1
    ctx.append("user", "shorter")
    await ctx.generate()
    return list(ctx.branches())


def test_continuations_that_are_cancelled_leave_no_token(model_dir: str) -> None:
    journal, plane = resumed_from_everywhere(cancelling, [sampled(65), NEVER, sampled(67), sampled(68)], model_dir)
    kinds = ["step", "step", *["step-cancelled"] * 3, "step"]
    assert [kind for kind, _ in journal] == kinds
    assert plane.calls[-1].step_id == ("t", 0, 1)


async def losing(ctx: LiveContext) -> list[LiveContext]:
    """One of three continuations fails; the program goes on with another message."""
    ctx.append("user", "hello")
    with pytest.raises(StepLost, match="step 0: gone"):
        await ctx.generate(n=3)
    assert len(asyncio.all_tasks()) == 1, "the others are cancelled and awaited"
    assert ctx.generated_tokens == 0
    ctx.append("user", "and now?")
    await ctx.generate()
    return list(ctx.branches())


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_continuation_that_fails_cancels_the_others(failing: int, model_dir: str) -> None:
    first: list[Any] = [NEVER, NEVER]
    first.insert(failing, lost("refused"))
    journal, plane = resumed_from_everywhere(losing, [*first, sampled(68)], model_dir)
    assert [kind for kind, _ in journal] == ["step-lost", "step-cancelled", "step-cancelled", "step"]
    assert plane.calls[-1].step_id == ("t", 0, 1)


async def losing_once(ctx: LiveContext) -> list[LiveContext]:
    """A step that was preempted fails; the program asks again."""
    ctx.append("user", "hello")
    with pytest.raises(StepLost):
        await ctx.generate()
    await ctx.generate()
    return [ctx]


def test_a_resumed_program_loses_the_steps_that_it_lost(model_dir: str) -> None:
    script = [sampled(65, status="aborted", reason="abort"), lost("refused"), sampled(66)]
    journal, plane = resumed_from_everywhere(losing_once, script, model_dir)
    assert [kind for kind, _ in journal] == ["step", "step-lost", "step"]
    assert plane.seen[2] == plane.seen[0], "a step that failed leaves no token"
    assert [call.step_id for call in plane.calls] == [("t", 0, 0), ("t", 0, 1), ("t", 0, 2)]
