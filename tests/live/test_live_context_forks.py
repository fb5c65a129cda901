"""Forks of a context: one history, two continuations, each with its steps, its tools and its record."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from worlds.scripted_plane import NEVER, ScriptedPlane, context_on, sampled

from heddle_dask.live.driver.context import BudgetExhausted, LiveContext
from heddle_dask.live.driver.resume import recorded_results
from heddle_dask.live.driver.services import Budget
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
