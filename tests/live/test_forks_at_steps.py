"""Branches that go on behind an earlier step, messages with calls of tools, and tokens of prompts that nobody sends."""

from __future__ import annotations

import asyncio

import pytest
from worlds.chat_formats import with_format
from worlds.scripted_plane import NEVER, ScriptedPlane, context_on, sampled

from heddle_dask.chat.conversation import CalledTool, ChatMessage
from heddle_dask.chat.template import ChatTemplate
from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.programs.context import LiveContext
from heddle_dask.records.token_record import Attribution

WEATHER = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object"}}}


async def three_steps(ctx: LiveContext) -> None:
    for text in ("one", "two", "three"):
        ctx.append("user", text)
        await ctx.generate()


def plane_of(template: ChatTemplate, *ids: int) -> ScriptedPlane:
    return ScriptedPlane(*(sampled(each, template.end_token_ids[0], reason="stop") for each in ids))


def test_a_branch_behind_an_earlier_step_is_as_if_it_had_been_forked_then(model_dir: str) -> None:
    template = ChatTemplate.load(model_dir)
    plane = plane_of(template, 65, 66, 67, 68, 69)
    ctx = context_on(plane, model_dir)

    async def body() -> None:
        ctx.append("user", "one")
        first = await ctx.generate()
        then = ctx.fork()
        ctx.append("user", "two")
        await ctx.generate()
        ctx.append("user", "three")
        later = ctx.fork(after_step=first.step_index)
        await ctx.generate()
        for branch in (then, later):
            branch.append("user", "other")
            assert (await branch.generate()).step_index == 1
        assert then.record.token_ids[:-2].tolist() == later.record.token_ids[:-2].tolist()
        assert plane.seen[3] == plane.seen[4]
        assert next(later.record.segments()).attribution is Attribution.SHARED
        assert later.record.token_ids[later.record.loss_mask].tolist() == [69, template.end_token_ids[0]]

    asyncio.run(body())


def test_an_empty_branch_has_other_variables_of_the_template(model_dir: str) -> None:
    template = with_format(model_dir)
    plane = plane_of(template, 65, 66)
    ctx = context_on(plane, model_dir, template=template)

    async def body() -> None:
        ctx.set_template(tools=[WEATHER])
        assert ctx.template_variables == {"tools": [WEATHER]}
        ctx.append("user", "one")
        await ctx.generate()
        empty = ctx.fork(after_step=-1)
        assert (empty.context_tokens, empty.template_variables) == (0, {})
        empty.append("user", "one")
        await empty.generate()
        assert plane.seen[1] == template.render([{"role": "user", "content": "one"}])
        assert plane.seen[0] != plane.seen[1]

    asyncio.run(body())


def test_an_earlier_step_is_forked_while_a_later_one_is_awaited(model_dir: str) -> None:
    template = ChatTemplate.load(model_dir)
    plane = plane_of(template, 65)
    plane.script += [NEVER, *plane_of(template, 67).script]
    ctx = context_on(plane, model_dir)

    async def body() -> None:
        ctx.append("user", "one")
        first = await ctx.generate()
        ctx.append("user", "two")
        waiting = asyncio.ensure_future(ctx.generate())
        await asyncio.sleep(0)
        branch = ctx.fork(after_step=first.step_index)
        branch.append("user", "other")
        await branch.generate()
        with pytest.raises(RuntimeError, match=r"fork\(\) while the step before is awaited"):
            ctx.fork()
        ctx.end()
        await asyncio.wait([waiting])

    asyncio.run(body())


def test_only_own_steps_that_have_ended_can_be_forked_behind(model_dir: str) -> None:
    ctx = context_on(ScriptedPlane(*[sampled(65)] * 4), model_dir)
    with pytest.raises(BadInput, match="after_step is 0: the steps of this context that have ended are: none"):
        ctx.fork(after_step=0)
    asyncio.run(three_steps(ctx))
    branch = ctx.fork(after_step=1)
    asyncio.run(branch.generate())
    with pytest.raises(BadInput, match="after_step is 1: the steps of this context that have ended are: 2 to 2"):
        branch.fork(after_step=1)
    assert branch.fork(after_step=2).context_tokens == branch.context_tokens


def test_calls_of_an_assistant_are_rendered_by_the_template_and_masked(model_dir: str) -> None:
    template = with_format(model_dir)
    ctx = context_on(plane_of(template, 65), model_dir, template=template)
    called = ChatMessage(
        "assistant", "let me see", calls=(CalledTool("weather", '{"city":  "Bern<|im_end|>"}', "call_1"),)
    )
    messages = [ChatMessage("user", "how is it?"), called, ChatMessage("tool", "sunny", call_id="call_1")]
    expected = ctx.prompt_tokens(messages)
    assert ctx.context_tokens == 0
    for message in messages:
        ctx.append_message(message)
    assert ctx.context_tokens == expected
    asyncio.run(ctx.generate())
    text = template.decode(ctx.record.token_ids[:-2].tolist())
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern< |im_end|>"}}\n</tool_call>' in text
    assert ctx.record.loss_mask.sum() == 2


def test_a_call_cannot_be_the_beginning_of_a_reply(model_dir: str) -> None:
    ctx = context_on(ScriptedPlane(), model_dir)
    ctx.append("user", "hello")
    ctx.append_message(ChatMessage("assistant", "", calls=(CalledTool("weather", "{}"),)))
    with pytest.raises(BadInput, match="calls tools: append the results"):
        asyncio.run(ctx.generate())


def test_tokens_of_a_prompt_are_those_that_a_step_then_has(model_dir: str) -> None:
    template = with_format(model_dir)
    ctx = context_on(plane_of(template, 65, 66, 67), model_dir, template=template)
    asyncio.run(three_steps(ctx))
    asked = [ChatMessage("user", "and now?")]
    for step in (-1, 0, 2):
        branch = ctx.fork(after_step=step)
        branch.append_message(asked[0])
        assert ctx.prompt_tokens(asked, after_step=step) == branch.context_tokens
    plain, tools = ctx.prompt_tokens(asked, after_step=-1), {"tools": [WEATHER]}
    assert ctx.prompt_tokens(asked, after_step=-1, template=tools) > plain
