"""The clients of OpenAI and Anthropic, as they are, against the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel
from worlds.scripted_exchange import KEY, ScriptedExchange, answered, said, served

from heddle_dask.chat.conversation import CalledTool
from heddle_dask.gateway.orders import OrderRefused

TOOL = {"name": "weather", "description": "Weather of a place.", "parameters": {"type": "object", "properties": {}}}
CALL = CalledTool("weather", '{"place": "Ulm"}', "call_1")
RAW_CALL = '<think>\nlook\n</think>\n\nLet me see.\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
CALLING = answered(said("Let me see.", "look", [CALL], raw=RAW_CALL))
TEXT = answered(said("Sunny, 20 degrees.", "easy"))
ASK: Any = [{"role": "user", "content": "Weather in Ulm?"}]


def with_clients(
    check: Callable[[openai.AsyncOpenAI, anthropic.AsyncAnthropic], Awaitable[None]], exchange: ScriptedExchange
) -> None:
    async def body() -> None:
        async with (
            served({KEY: exchange}) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=1) as first,
            anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=1) as second,
        ):
            await asyncio.wait_for(check(first, second), 60)

    asyncio.run(body())


def test_chat_completions_plain_and_streamed() -> None:
    async def check(client: openai.AsyncOpenAI, _other: anthropic.AsyncAnthropic) -> None:
        plain = await client.chat.completions.create(model="m", messages=ASK, logprobs=True)
        choice = plain.choices[0]
        assert choice.message.content == "Sunny, 20 degrees." and choice.finish_reason == "stop"
        assert choice.message.model_extra["reasoning_content"] == "easy"
        assert choice.logprobs.content[0].logprob == -0.5
        assert plain.usage.total_tokens == 27 and plain.usage.prompt_tokens_details.cached_tokens == 5

        tools: Any = [{"type": "function", "function": TOOL}]
        options: Any = {"include_usage": True}
        async with client.chat.completions.stream(
            model="m", messages=ASK, tools=tools, stream_options=options
        ) as stream:
            deltas = [each.delta async for each in stream if each.type == "content.delta"]
            final = await stream.get_final_completion()
        assert len(deltas) > 1 and "".join(deltas) == "Let me see."
        message = final.choices[0].message
        assert message.content == "Let me see." and final.choices[0].finish_reason == "tool_calls"
        function = message.tool_calls[0].function
        assert (function.name, function.arguments, message.tool_calls[0].id) == (CALL.name, CALL.arguments, "call_1")
        assert final.usage.completion_tokens == 7

    with_clients(check, ScriptedExchange([TEXT, CALLING]))


def test_several_choices_stream_side_by_side() -> None:
    async def check(client: openai.AsyncOpenAI, _other: anthropic.AsyncAnthropic) -> None:
        texts = ["", ""]
        async for chunk in await client.chat.completions.create(model="m", messages=ASK, n=2, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == ["first of them", "second of them"]

    with_clients(check, ScriptedExchange([answered(said("first of them"), said("second of them"))]))


def test_structured_output_is_parsed() -> None:
    class Weather(BaseModel):
        degrees: int

    async def check(client: openai.AsyncOpenAI, other: anthropic.AsyncAnthropic) -> None:
        parsed = await client.chat.completions.parse(model="m", messages=ASK, response_format=Weather)
        assert parsed.choices[0].message.parsed == Weather(degrees=20)
        response = await client.responses.parse(model="m", input="?", text_format=Weather)
        assert response.output_parsed == Weather(degrees=20)
        message = await other.messages.parse(model="m", max_tokens=9, messages=ASK, output_format=Weather)
        assert message.parsed_output == Weather(degrees=20)

    exchange = ScriptedExchange([answered(said('{"degrees": 20}'))])
    with_clients(check, exchange)
    assert all(order.structured is not None and "degrees" in order.structured.json_schema for order in exchange.orders)


def test_responses_plain_and_streamed() -> None:
    async def check(client: openai.AsyncOpenAI, _other: anthropic.AsyncAnthropic) -> None:
        plain = await client.responses.create(model="m", input="Weather in Ulm?")
        assert plain.status == "completed" and plain.output_text == "Sunny, 20 degrees."
        assert plain.output[0].content[0].text == "easy"
        assert plain.usage.input_tokens_details.cached_tokens == 5

        tools: Any = [{"type": "function", **TOOL}]
        kinds, deltas = [], []
        async with client.responses.stream(model="m", input="And now?", tools=tools) as stream:
            async for each in stream:
                kinds.append(each.type)
                if each.type == "response.output_text.delta":
                    deltas.append(each.delta)
            final = await stream.get_final_response()
        assert len(deltas) > 1 and "".join(deltas) == "Let me see." == final.output_text
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert final.output[2].arguments == CALL.arguments and final.output[2].call_id == "call_1"
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"

        later = await client.responses.create(model="m", input="Well?", previous_response_id=final.id)
        assert later.previous_response_id == final.id

    exchange = ScriptedExchange([TEXT, CALLING, TEXT])
    with_clients(check, exchange)
    assert [message.role for message in exchange.orders[2].messages] == ["user", "assistant", "user"]
    assert exchange.orders[2].messages[1].calls == (CALL,)


def test_messages_plain_and_streamed() -> None:
    async def check(_other: openai.AsyncOpenAI, client: anthropic.AsyncAnthropic) -> None:
        plain = await client.messages.create(model="m", max_tokens=50, messages=ASK, stop_sequences=["."])
        assert [block.type for block in plain.content] == ["thinking", "text"]
        assert plain.stop_reason == "end_turn" and plain.usage.output_tokens == 7

        tools: Any = [{"name": "weather", "input_schema": TOOL["parameters"]}]
        async with client.messages.stream(model="m", max_tokens=50, messages=ASK, tools=tools) as stream:
            text = [each async for each in stream.text_stream]
            final = await stream.get_final_message()
        assert len(text) > 1 and "".join(text) == "Let me see."
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
        assert final.content[0].thinking == "look" and final.content[2].input == {"place": "Ulm"}
        assert final.stop_reason == "tool_use" and final.usage.output_tokens == 7

        counted = await client.messages.count_tokens(model="m", messages=ASK)
        assert counted.input_tokens == 10

    with_clients(check, ScriptedExchange([TEXT, CALLING]))


def test_a_stop_sequence_is_named() -> None:
    async def check(_other: openai.AsyncOpenAI, client: anthropic.AsyncAnthropic) -> None:
        message = await client.messages.create(model="m", max_tokens=9, messages=ASK, stop_sequences=["END"])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")

    with_clients(check, ScriptedExchange([answered(said("so far ", raw="so far END", stopped_by="END"))]))


def test_a_cut_answer_says_so_in_each_api() -> None:
    async def check(client: openai.AsyncOpenAI, other: anthropic.AsyncAnthropic) -> None:
        chat = await client.chat.completions.create(model="m", messages=ASK)
        assert chat.choices[0].finish_reason == "length"
        response = await client.responses.create(model="m", input="?")
        assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
        message = await other.messages.create(model="m", max_tokens=9, messages=ASK)
        assert message.stop_reason == "max_tokens"

    with_clients(check, ScriptedExchange([answered(said("half", finish="length"))]))


def test_refusals_are_the_clients_own_errors() -> None:
    async def check(client: openai.AsyncOpenAI, other: anthropic.AsyncAnthropic) -> None:
        for expected, code in ((openai.BadRequestError, "context_length_exceeded"),
                               (openai.PermissionDeniedError, "insufficient_quota")):  # fmt: skip
            with pytest.raises(expected) as refused:
                await client.chat.completions.create(model="m", messages=ASK)
            assert refused.value.code == code
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await other.messages.create(model="m", max_tokens=9, messages=ASK)
        with pytest.raises(anthropic.PermissionDeniedError):
            await other.messages.create(model="m", max_tokens=9, messages=ASK)

    context, budget = OrderRefused("4,097 tokens", "context_length"), OrderRefused("used up", "budget")
    exchange = ScriptedExchange([context, budget, context, budget])
    with_clients(check, exchange)
    assert len(exchange.orders) == 4  # nothing was tried again


def test_models_are_listed() -> None:
    async def check(client: openai.AsyncOpenAI, other: anthropic.AsyncAnthropic) -> None:
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert [model.id async for model in other.models.list()] == ["policy"]

    with_clients(check, ScriptedExchange([TEXT]))
