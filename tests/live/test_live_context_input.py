"""What a program appends: refused if it is no text, rendered once, each token with its author."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds.scripted_plane import ScriptedPlane, context_on, lost, sampled

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.driver.programs.context import LiveContext
from heddle_dask.live.driver.programs.steps import BudgetExhausted, StepLost
from heddle_dask.records.token_record import Attribution

PROMPT, TOOL, TEMPLATE = Attribution.PROMPT, Attribution.TOOL, Attribution.TEMPLATE
IMAGE = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]


def text_by_author(ctx: LiveContext, template: ChatTemplate) -> list[tuple[Attribution, str]]:
    return [
        (segment.attribution, template.decode([*segment.token_ids.tolist(), template.end_token_ids[0]]))
        for segment in ctx.record.segments()
    ]


@pytest.mark.parametrize(
    ("role", "content", "message"),
    [
        ("user", IMAGE, "has a part of type image: only text is supported"),
        ("user", [{"type": "input_audio"}], "has a part of type audio"),
        ("user", [{"type": "text", "text": "hello"}], "the content is a list: give a text"),
        ("user", {"type": "image"}, "has a part of type image"),
        ("tool", None, "the content is a NoneType: give a text"),
        ("tool", 42, "the content is a int: give a text"),
        ("tool", b"x", "the content is a bytes: give a text"),
        ("developer", "x", "role is 'developer': use system, user, assistant, tool"),
        (None, "x", "role is None"),
        (["user"], "x", "role is "),
    ],
)
def test_what_is_no_message_is_refused_at_the_call(role: Any, content: Any, message: str, model_dir: str) -> None:
    ctx = context_on(ScriptedPlane(), model_dir)
    with pytest.raises(BadInput, match=f"append: .*{message}") as refused:
        ctx.append(role, content)
    assert "\n" not in str(refused.value)
    assert ctx.context_tokens == 0


@pytest.mark.parametrize("tokens", ["abc", 5, [1.5], ["1"], [[1]], [-1], [2**31], None, [True], {1: 2}])
def test_what_is_no_token_is_refused_at_the_call(tokens: Any, model_dir: str) -> None:
    ctx = context_on(ScriptedPlane(), model_dir)
    with pytest.raises(BadInput, match="append_tokens: "):
        ctx.append_tokens(tokens)
    ctx.append_tokens([])
    ctx.append_tokens(np.array([1, 2], np.int64))  # type: ignore[arg-type]
    assert ctx.context_tokens == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"timeout_s": v}, "timeout_s is ") for v in [0, -1, math.nan, "5", True]),
        ({"kind": "other"}, "kind is 'other': use tool or reward"),
        ({"label": 5}, "label is 5"),
    ],
)
def test_what_no_action_can_have_is_refused_at_the_call(options: dict[str, Any], message: str, model_dir: str) -> None:
    ctx = context_on(ScriptedPlane(), model_dir)
    with pytest.raises(BadInput, match=f"call: {message}"):
        asyncio.run(ctx.call(max, 1, 2, **options))
    for cpus in (-1, (1,), ("1", 2), (2, 1), (-1, 1), (True, 1), set(), "2"):
        with pytest.raises(BadInput, match="needs: cpus is "):
            asyncio.run(ctx.call(max, 1, 2, cpus=cpus))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="'max' is no function"):
        asyncio.run(ctx.call("max"))  # type: ignore[arg-type]
    assert ctx.actions == []


def test_each_token_has_its_author(model_dir: str) -> None:
    template = ChatTemplate.load(model_dir)
    ctx = context_on(ScriptedPlane(sampled(65, 66), sampled(67)), model_dir)

    async def body() -> None:
        ctx.append("system", "be brief")
        ctx.append("user", "hello")
        await ctx.generate()
        ctx.append("tool", "seen")
        ctx.append("user", "and?")
        await ctx.generate()

    asyncio.run(body())
    said = text_by_author(ctx, template)
    assert [text for author, text in said if author is PROMPT] == ["be brief", "hello", "and?"]
    assert [text for author, text in said if author is TOOL] == ["seen"]
    own = "".join(text for author, text in said if author is TEMPLATE)
    assert "hello" not in own and own.count("<|im_start|>") == 6
    assert ctx.record.token_ids[ctx.record.loss_mask].tolist() == [65, 66, 67]


def test_where_contents_cannot_be_told_a_delta_is_its_last_authors(model_dir: str, tmp_path: Path) -> None:
    """The template shouts: what it shows is not what was appended."""
    template = ChatTemplate.load(model_dir)
    chat = template._tokenizer.chat_template
    template._tokenizer.chat_template = chat.replace("content", "content | upper")
    assert template._tokenizer.chat_template != chat
    ctx = context_on(ScriptedPlane(sampled(65)), model_dir, template=template)
    ctx.append("user", "hello")
    asyncio.run(ctx.generate())
    assert [author for author, _ in text_by_author(ctx, template)] == [PROMPT, Attribution.POLICY]


def test_an_assistant_message_is_masked_and_one_at_the_end_is_continued(model_dir: str) -> None:
    template = ChatTemplate.load(model_dir)
    plane = ScriptedPlane(sampled(65, template.end_token_ids[0], reason="stop"), sampled(66))
    ctx = context_on(plane, model_dir)

    async def body() -> None:
        for role, text in [("user", "1+1"), ("assistant", "2"), ("user", "2+2"), ("assistant", "It is")]:
            ctx.append(role, text)  # type: ignore[arg-type]
        await ctx.generate()
        ctx.append("user", "3+3")
        await ctx.generate()

    asyncio.run(body())
    first = template.decode([*plane.seen[0], template.end_token_ids[0]])
    assert first == template.decode(
        [
            *template.render(
                [
                    {"role": "user", "content": "1+1"},
                    {"role": "assistant", "content": "2"},
                    {"role": "user", "content": "2+2"},
                ]
            ),
            *template._encode("It is"),
            template.end_token_ids[0],
        ]
    )
    assert [text for author, text in text_by_author(ctx, template) if author is PROMPT] == [
        *("1+1", "2", "2+2", "It is", "3+3")
    ]
    assert int(ctx.record.loss_mask.sum()) == 3


def test_asking_for_the_length_does_not_end_the_delta(model_dir: str) -> None:
    """Messages before and after `done` or `context_tokens` are one delta: no generation prompt comes between them."""
    contexts = [context_on(ScriptedPlane(sampled(65)), model_dir) for _ in range(2)]
    for asks, ctx in zip([True, False], contexts, strict=True):
        ctx.append("system", "one")
        if asks:
            assert not ctx.done and ctx.context_tokens > 0
        ctx.append("user", "two")
        before = ctx.context_tokens
        asyncio.run(ctx.generate())
        assert ctx.steps[0].prompt_tokens == before
    assert contexts[0].record == contexts[1].record


def test_variables_of_the_template_are_set_before_anything_is_appended(model_dir: str, tmp_path: Path) -> None:
    template = ChatTemplate.load(model_dir)
    own = "{%- if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    template._tokenizer.chat_template = own + template._tokenizer.chat_template
    tool = {"type": "function", "function": {"name": "weather"}}
    ctx = context_on(ScriptedPlane(sampled(65)), model_dir, template=template)
    other = context_on(ScriptedPlane(sampled(65)), model_dir, template=template)
    ctx.set_template(tools=[tool])
    for each in (ctx, other):
        each.append("user", "hello")
        asyncio.run(each.generate())
    (first, *_) = text_by_author(ctx, template)
    assert first[0] is TEMPLATE and '"weather"' in first[1]
    assert '"weather"' not in text_by_author(other, template)[0][1]
    with pytest.raises(BadInput, match="before anything is appended"):
        ctx.set_template(tools=[])


def test_ones_own_reply_is_not_appended_again(model_dir: str) -> None:
    plane = ScriptedPlane(sampled(65, 66), sampled(67), sampled(68))
    ctx = context_on(plane, model_dir)

    async def body() -> None:
        ctx.append("user", "hello")
        reply = await ctx.generate()
        fork = ctx.fork()
        for branch in (ctx, fork):
            with pytest.raises(BadInput, match="append: this is the reply, which the context has kept"):
                branch.append("assistant", f" {reply.text}\n")
            branch.append("user", reply.text)
            await branch.generate()

    asyncio.run(body())
    assert [text for author, text in text_by_author(ctx, ChatTemplate.load(model_dir)) if author is PROMPT] == [
        "hello",
        "AB",
    ]


def test_the_record_has_only_what_an_engine_saw(model_dir: str) -> None:
    budget = Budget(max_context_tokens=100)
    plane = ScriptedPlane(sampled(65, 66), lost("refused"))
    ctx = context_on(plane, model_dir, budget=budget)

    async def body() -> None:
        ctx.append("user", "hello")
        await ctx.generate()
        seen = len(ctx.finished_record)
        assert seen == len(plane.seen[0]) + 2
        ctx.append("tool", "x")
        with pytest.raises(StepLost):
            await ctx.generate()
        assert len(ctx.finished_record) == seen, "a refused step"
        ctx.append("tool", "a long text; " * 90)
        with pytest.raises(BudgetExhausted, match="fills the limit of 100"):
            await ctx.generate()
        ctx.append_tokens([65])
        assert len(ctx.finished_record) == seen < len(ctx.record)

    asyncio.run(body())
    long = context_on(ScriptedPlane(), model_dir, budget=budget)
    long.append("user", "a long text; " * 90)
    with pytest.raises(BudgetExhausted):
        asyncio.run(long.generate())
    assert len(long.finished_record) == 0


def test_a_reply_knows_whether_its_prompt_opened_the_thinking(model_dir: str) -> None:
    plane = ScriptedPlane(sampled(*b"hm</think>4"), sampled(*b"hm"), sampled(*b"4"))
    ctx = context_on(plane, model_dir)

    async def answers() -> list[str]:
        found = []
        for begun in ("<think>\n", "<think>", "It is "):
            ctx.append("user", "2+2")
            ctx.append("assistant", begun)
            found.append((await ctx.generate()).answer)
        return found

    assert asyncio.run(answers()) == ["4", "", "4"]
