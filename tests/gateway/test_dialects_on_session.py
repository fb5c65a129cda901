"""Conversations of official clients, each in its own dialect, go on from what was sampled: no fork, no altered turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from worlds.chat_formats import with_format
from worlds.sampling_plane import SamplingPlane
from worlds.scripted_exchange import KEY, served
from worlds.scripted_plane import context_on

from heddle_dask.chat.tool_calls import format_call
from heddle_dask.gateway.session import GatewaySession

PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Of a place.", "parameters": PARAMETERS}
THINKS = "<think>\nwhere?\n</think>\n\n"
REPLIES = [
    THINKS + "Let me see.\n" + format_call("weather", {"place": "Ulm"}),
    format_call("weather", {"place": "Bern"}) + "\n" + format_call("weather", {"place": 'a\n"b" é'}),
    THINKS + "Sunny.",
    "Yes.",
]
Talk = Callable[[str, bool], Awaitable[None]]


async def chat_completions(url: str, streams: bool) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"}]
        tools: Any = [{"type": "function", "function": FUNCTION}]
        for _ in REPLIES:
            if streams:
                async with client.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:
                    message: Any = (await stream.get_final_completion()).choices[0].message
            else:
                answer = await client.chat.completions.create(model="m", messages=messages, tools=tools)
                message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
            if not message.tool_calls:
                messages.append({"role": "user", "content": "Sure?"})


async def responses(url: str, streams: bool) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        items: list[Any] = [{"role": "user", "content": "Weather?"}]
        asked: Any = {"model": "m", "tools": [{"type": "function", **FUNCTION}], "instructions": "Be brief."}
        for _ in REPLIES:
            if streams:
                async with client.responses.stream(input=items, **asked) as stream:
                    answer: Any = await stream.get_final_response()
            else:
                answer = await client.responses.create(input=items, **asked)
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            calls = [item for item in answer.output if item.type == "function_call"]
            items += [{"type": "function_call_output", "call_id": each.call_id, "output": "sunny"} for each in calls]
            if not calls:
                items.append({"role": "user", "content": "Sure?"})


async def messages(url: str, streams: bool) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY) as client:
        said: list[Any] = [{"role": "user", "content": "Weather?"}]
        tool = {"name": "weather", "description": "Of a place.", "input_schema": PARAMETERS}
        asked: Any = {"model": "m", "max_tokens": 500, "system": "Be brief.", "tools": [tool]}
        for _ in REPLIES:
            if streams:
                async with client.messages.stream(messages=said, **asked) as stream:
                    answer: Any = await stream.get_final_message()
            else:
                answer = await client.messages.create(messages=said, **asked)
            said.append({"role": "assistant", "content": [block.model_dump(mode="json") for block in answer.content]})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
                for block in answer.content
                if block.type == "tool_use"
            ]
            said.append({"role": "user", "content": results or "Sure?"})


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("talk", [chat_completions, responses, messages])
def test_a_conversation_of_a_client_is_one_branch(talk: Talk, streams: bool, model_dir: str) -> None:
    template = with_format(model_dir)
    plane = SamplingPlane(template, lambda number: REPLIES[number])
    ctx = context_on(plane, "", template=template)

    async def body() -> None:
        async with served({KEY: GatewaySession(ctx)}) as url:
            await asyncio.wait_for(talk(url, streams), 30)

    asyncio.run(body())
    assert [len(branch.steps) for branch in ctx.branches()] == [len(REPLIES)]
    assert ctx.metadata == {}
    for before, after in zip(plane.steps, plane.steps[1:], strict=False):
        own = [*before.context, *before.ids]
        assert after.context[: len(own)] == own, "what was sampled is where it was"
