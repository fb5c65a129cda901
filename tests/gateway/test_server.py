"""The gateway's server by raw HTTP: orders of requests, refusals in each API's form, and clients that go away."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientSession
from worlds.scripted_exchange import KEY, ScriptedExchange, answered, caller, said, served

from heddle_dask.chat.conversation import CalledTool, ChatMessage
from heddle_dask.core.sampling import StructuredOutput
from heddle_dask.gateway.orders import OrderRefused, RefusalKind
from heddle_dask.gateway.server import MOST_BODY_BYTES

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "input": "hello", "model": "any", "max_tokens": 50}
Check = Callable[[ScriptedExchange, ClientSession], Awaitable[None]]


def with_gateway(check: Check, exchange: ScriptedExchange | None = None, patience_s: float = 10.0) -> None:
    exchange = exchange or ScriptedExchange([answered(said("hi"))])

    async def body() -> None:
        async with served({KEY: exchange}, patience_s) as url, caller(url) as session:
            await asyncio.wait_for(check(exchange, session), 60)

    asyncio.run(body())


async def posted(session: ClientSession, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(path, data=data, headers=headers) as response:
        return response.status, await response.json()


async def events_of(response: Any) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
            yield json.loads(line[6:])


def test_a_chat_request_is_an_order() -> None:
    tool = {"name": "run", "description": "Runs it.", "parameters": {"type": "object", "properties": {}}}
    body = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"a":1}'}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "ok", "unknown": 1},
        ],
        "model": "gpt-7",
        "tools": [{"type": "function", "function": {**tool, "unknown": 1}}],
        "tool_choice": {"type": "function", "function": {"name": "run"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "max_tokens": 9,
        "max_completion_tokens": 8,
        "temperature": 0.5,
        "stop": "END",
        "n": 2,
        "seed": 3,
        "reasoning_effort": "low",
        "cache_me": {"unknown": True},
    }

    async def check(exchange: ScriptedExchange, session: ClientSession) -> None:
        status, answer = await posted(
            session, CHAT, body, **{"Idempotency-Key": "once", "x-stainless-retry-count": "1"}
        )
        assert status == 200 and answer["model"] == "gpt-7" and len(answer["choices"]) == 2
        order = exchange.orders[0]
        assert order.messages == (
            ChatMessage("system", "Be brief."),
            ChatMessage("user", "one\ntwo"),
            ChatMessage("assistant", "", "hm", (CalledTool("run", '{"a":1}', "c1"),)),
            ChatMessage("tool", "ok", call_id="c1"),
        )
        assert json.loads(order.tools) == [{"type": "function", "function": tool}]
        assert order.tool_choice == "tool:run"
        assert order.structured == StructuredOutput(json_schema={"type": "object"})
        assert (order.max_tokens, order.temperature, order.stop, order.n, order.seed) == (8, 0.5, ("END",), 2, 3)
        assert json.loads(order.template) == {"reasoning_effort": "low", "enable_thinking": True}
        assert order.idempotency_key == "once" and order.is_retry and order.request_id and not order.streams

    with_gateway(check, ScriptedExchange([answered(said("hi"), said("ho"))]))


def test_a_messages_request_is_an_order() -> None:
    body = {
        "model": "claude",
        "max_tokens": 9,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief."},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I run it."},
                    {"type": "tool_use", "id": "t1", "name": "run", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "ok"}]},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        "tools": [
            {"name": "run", "input_schema": {"type": "object"}},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "tool_choice": {"type": "any"},
        "stop_sequences": ["END"],
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    }

    async def check(exchange: ScriptedExchange, session: ClientSession) -> None:
        status, answer = await posted(session, MESSAGES, body, **{"anthropic-beta": "whatever-2026-01-01"})
        assert status == 200 and answer["content"] == [{"type": "text", "text": "hi"}]
        assert answer["stop_reason"] == "end_turn"
        assert answer["usage"]["input_tokens"] == 15 and answer["usage"]["cache_read_input_tokens"] == 5
        order = exchange.orders[0]
        assert order.messages == (
            ChatMessage("system", "Be brief."),
            ChatMessage("user", "one"),
            ChatMessage("assistant", "I run it.", "hm", (CalledTool("run", '{"a": 1}', "t1"),)),
            ChatMessage("tool", "ok", call_id="t1"),
            ChatMessage("user", "go on"),
        )
        shown = {"name": "run", "description": None, "parameters": {"type": "object"}}
        assert json.loads(order.tools) == [{"type": "function", "function": shown}]
        assert order.tool_choice == "required" and order.stop == ("END",) and order.max_tokens == 9
        assert order.structured is not None and json.loads(order.template)["enable_thinking"] is False
        assert not order.is_retry
        assert await posted(session, MESSAGES + "/count_tokens", body) == (200, {"input_tokens": 50})

    with_gateway(check)


def test_items_of_a_response_are_turns_and_a_later_request_continues_them() -> None:
    tools = [
        {"type": "function", "name": "run", "parameters": {"type": "object"}},
        {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": {"type": "text"}},
        {"type": "local_shell"},
        {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "find", "parameters": {}}]},
        {"type": "web_search"},
    ]
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "More."}]},
        {"role": "user", "content": "go"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Now."}]},
        {"type": "function_call", "call_id": "1", "name": "find", "namespace": "mcp", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "*** Begin"},
        {"type": "local_shell_call", "call_id": "3", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "function_call_output", "call_id": "1", "output": "found"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "local_shell_call_output", "id": "3", "output": "a.py"},
    ]
    calls = (
        CalledTool("apply_patch", '{"input": "*** End"}', "4"),
        CalledTool("local_shell", '{"command": ["pwd"], "timeout_ms": 5}', "5"),
        CalledTool("mcp__find", '{"x": 1}', "6"),
    )

    async def check(exchange: ScriptedExchange, session: ClientSession) -> None:
        body = {"model": "m", "instructions": "First.", "input": items, "tools": tools, "tool_choice": "auto"}
        status, answer = await posted(session, RESPONSES, body)
        assert status == 200
        first = exchange.orders[0]
        turn = (
            CalledTool("mcp__find", "{}", "1"),
            CalledTool("apply_patch", '{"input": "*** Begin"}', "2"),
            CalledTool("local_shell", '{"command": ["ls"]}', "3"),
        )
        assert first.messages == (
            ChatMessage("system", "First.\n\nMore."),
            ChatMessage("user", "go"),
            ChatMessage("assistant", "Now.", "hm", turn),
            ChatMessage("tool", "found", call_id="1"),
            ChatMessage("tool", "done", call_id="2"),
            ChatMessage("tool", "a.py", call_id="3"),
        )
        names = [tool["function"]["name"] for tool in json.loads(first.tools)]
        assert names == ["run", "apply_patch", "local_shell", "mcp__find"]
        patch, shell, find = answer["output"]
        assert (patch["type"], patch["input"]) == ("custom_tool_call", "*** End")
        assert shell["action"] == {"type": "exec", "command": ["pwd"], "env": {}, "timeout_ms": 5}
        assert (find["type"], find["namespace"], find["name"]) == ("function_call", "mcp", "find")

        later = {"previous_response_id": answer["id"], "instructions": "Second.", "input": "and now?"}
        assert (await posted(session, RESPONSES, later))[0] == 200
        assert exchange.orders[1].messages == (
            ChatMessage("system", "Second."),
            *first.messages[1:],
            ChatMessage("assistant", "", "", calls),
            ChatMessage("user", "and now?"),
        )
        status, error = await posted(session, RESPONSES, {"previous_response_id": "resp_other", "input": "x"})
        assert status == 400 and "not kept" in error["error"]["message"]

    with_gateway(check, ScriptedExchange([answered(said(calls=calls)), answered(said("end"))]))


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"messages": [', 400, "not valid JSON"),
        (b"[" * 100_000, 400, "nested too deep"),
        (b'"text"', 400, "must be a JSON object"),
        ({"messages": 7, "input": 7}, 400, "Input should be"),
        ({"messages": [], "input": []}, 400, "at least one"),
        ({**HELLO, "temperature": -1}, 400, "temperature is -1"),
        ({**HELLO, "stream": "perhaps"}, 400, "stream"),
        ({**HELLO, "tool_choice": {"type": "function", "name": "none_such"}}, 400, "tool"),
    ],
)
def test_what_is_no_request_is_refused_in_one_line(path: str, body: Any, status: int, message: str) -> None:
    async def check(exchange: ScriptedExchange, session: ClientSession) -> None:
        got, answer = await posted(session, path, body)
        assert got == status and message in answer["error"]["message"] and "\n" not in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"
        assert not exchange.orders

    with_gateway(check)


def test_images_are_refused_and_half_characters_are_not() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [image]}

    async def check(exchange: ScriptedExchange, session: ClientSession) -> None:
        for path, body in (
            (CHAT, {"messages": [{"role": "user", "content": [picture]}]}),
            (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
            (MESSAGES, {"messages": [{"role": "user", "content": [result]}]}),
        ):
            status, answer = await posted(session, path, body)
            assert status == 400 and "images are not supported" in answer["error"]["message"]
        half = b'{"messages": [{"role": "user", "content": "half \\ud83d"}]}'
        assert (await posted(session, CHAT, half))[0] == 200
        assert exchange.orders[0].messages[0].content == "half \\ud83d"

    with_gateway(check)


def test_a_body_of_100_mb_is_refused_unread() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * (1 << 20)

    async def check(_exchange: ScriptedExchange, session: ClientSession) -> None:
        async with session.post(MESSAGES, data=io.BytesIO(b" " * (100 << 20))) as response:
            assert response.status == 413 and (await response.json())["error"]["type"] == "request_too_large"
        async with session.post(CHAT, data=chunks()) as response:
            assert response.status == 413
            assert f"{MOST_BODY_BYTES >> 20} MiB" in (await response.json())["error"]["message"]

    with_gateway(check)


@pytest.mark.parametrize(
    ("kind", "status", "openai", "anthropic"),
    [
        ("context_length", 400, "context_length_exceeded", "invalid_request_error"),
        ("budget", 403, "insufficient_quota", "permission_error"),
        ("overloaded", 429, "rate_limit_exceeded", "rate_limit_error"),
        ("failed", 500, "step_failed", "api_error"),
    ],
)
def test_a_refused_step_has_its_status(kind: RefusalKind, status: int, openai: str, anthropic: str) -> None:
    async def check(_exchange: ScriptedExchange, session: ClientSession) -> None:
        for stream in (False, True):
            async with session.post(CHAT, json={**HELLO, "stream": stream}) as response:
                assert response.status == status
                assert (await response.json())["error"]["code"] == openai
                assert ("Retry-After" in response.headers) == (kind == "overloaded")
            got, answer = await posted(session, MESSAGES, {**HELLO, "stream": stream})
            assert (got, answer["error"]["type"]) == (status, anthropic)
            assert answer["error"]["message"].startswith("prompt is too long: ") == (kind == "context_length")
        async with session.post(RESPONSES, json={**HELLO, "stream": True}) as response:
            if kind in ("context_length", "budget"):  # Codex knows these by the event only
                last = [each async for each in events_of(response)][-1]
                assert last["type"] == "response.failed" and last["response"]["error"]["code"] == openai
            else:
                assert response.status == status

    with_gateway(check, ScriptedExchange([OrderRefused("no more", kind)]))


def test_keys_are_by_either_header_and_others_are_unknown() -> None:
    exchange = ScriptedExchange([answered(said("hi"))])

    async def body() -> None:
        async with served({KEY: exchange}) as url, ClientSession(url) as session:
            for headers in ({"Authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}, {"x-api-key": KEY,
                            "Authorization": "Bearer other"}):  # fmt: skip
                assert (await posted(session, MESSAGES, HELLO, **headers))[0] == 200
            for headers in ({}, {"x-api-key": ""}, {"Authorization": "Bearer other"}, {"Authorization": KEY}):
                for path in (CHAT, RESPONSES, MESSAGES):
                    status, answer = await posted(session, path, HELLO, **headers)
                    assert status == 401 and "key" in answer["error"]["message"]
                async with session.get("/v1/models", headers=headers) as response:
                    assert response.status == 401
            async with session.get("/health") as response:
                assert response.status == 200

    asyncio.run(body())
    assert len(exchange.orders) == 3


def test_an_unknown_endpoint_and_a_model_of_any_name() -> None:
    async def check(_exchange: ScriptedExchange, session: ClientSession) -> None:
        async with session.get("/v1/files") as response:
            assert response.status == 404 and "no such endpoint" in (await response.json())["error"]["message"]
        async with session.get("/v1/models/org/model") as response:
            assert (await response.json())["id"] == "org/model"

    with_gateway(check)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_its_step(path: str, stream: bool) -> None:
    async def check(exchange: ScriptedExchange, session: ClientSession) -> None:
        async def call() -> None:
            async with session.post(path, json={**HELLO, "stream": stream}) as response:
                async for each in events_of(response):
                    if "hi" in json.dumps(each):
                        return

        task = asyncio.create_task(call())
        if stream:
            await task  # it has read the text, and closes the connection
        else:
            while not exchange.orders:
                await asyncio.sleep(0.01)
            task.cancel()
        await exchange.cancelled.wait()

    with_gateway(check, ScriptedExchange([answered(said("hi"))], holds=True))


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_client_hears_that_its_step_is_still_to_come(path: str) -> None:
    async def check(exchange: ScriptedExchange, session: ClientSession) -> None:
        async with session.post(path, json={**HELLO, "stream": True}) as response:
            heard = b""
            while not (b"still to come" in heard or b"ping" in heard or heard.count(b"in_progress") > 4):
                heard += await response.content.readany()

    with_gateway(check, ScriptedExchange([answered(said(""))], holds=True), patience_s=0.02)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_failure_in_mid_stream_ends_the_stream_with_an_error(path: str) -> None:
    class _Breaks(ScriptedExchange):
        async def answer(self, order: Any, on_text: Any = None) -> Any:
            on_text(0, "half of it")
            await asyncio.sleep(0.02)
            raise OrderRefused("the engine is lost", "failed")

    async def check(_exchange: ScriptedExchange, session: ClientSession) -> None:
        async with session.post(path, json={**HELLO, "stream": True}) as response:
            assert response.status == 200
            heard = [each async for each in events_of(response)]
        assert "half of it" in json.dumps(heard[:-1]) and "the engine is lost" in json.dumps(heard[-1])

    with_gateway(check, _Breaks([]))
