"""Anthropic's Messages: requests, answers, streams and errors. This module is an `AgentDialect`.

A conversation becomes the messages that vLLM makes of it: results of tools before the text of their turn, parts of a
text one a line, thinking beside the content.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from heddle_dask.chat.conversation import CalledTool, ChatMessage
from heddle_dask.core.errors import BadInput
from heddle_dask.gateway.dialects.contract import KeptConversations, event
from heddle_dask.gateway.dialects.offered_tools import OfferedTools, object_of
from heddle_dask.gateway.dialects.reading import (
    ApiFields,
    Parts,
    joined_text,
    read_fields,
    sampling_fields,
    structured_of,
    template_text,
)
from heddle_dask.gateway.orders import Choice, OrderRefused, RefusalKind, StepAnswer, StepOrder
from heddle_dask.gateway.text_holder import TextPart

# A line of Claude Code's with a hash that changes with each request: no history would ever match.
_CHANGING_LINE = "x-anthropic-billing-header"


class _Message(ApiFields):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class _Thinking(ApiFields):
    type: str = ""


class _OutputConfig(ApiFields):
    format: dict[str, Any] | None = None
    effort: str | None = None


class _Body(ApiFields):
    messages: list[_Message]
    model: str | None = None
    system: Parts = None
    stream: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def read_request(body: bytes, _kept: KeptConversations) -> MessagesRequest:
    fields = read_fields(_Body, body)
    if not fields.messages:
        raise BadInput("messages: at least one message is required")
    tools = _tools(fields.tools or ())
    config = fields.output_config or _OutputConfig()
    form = config.format or fields.output_format
    no_thinking = fields.thinking is not None and fields.thinking.type == "disabled"
    order = StepOrder(
        messages=tuple(_messages(fields)),
        tools=tools.text,
        tool_choice=_tool_choice(fields.tool_choice, tools),
        structured=structured_of(form, (form or {}).get("schema"), "output_config.format"),
        template=template_text(fields.chat_template_kwargs, "none" if no_thinking else config.effort),
        streams=bool(fields.stream),
        **sampling_fields(
            max_tokens=fields.max_tokens,
            temperature=fields.temperature,
            top_p=fields.top_p,
            top_k=fields.top_k,
            stop=fields.stop_sequences,
        ),
    )
    return MessagesRequest(order, fields.model or "")


_ERROR_TYPE: Mapping[RefusalKind, str] = {
    "invalid_request": "invalid_request_error",
    "authentication": "authentication_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "context_length": "invalid_request_error",
    "budget": "permission_error",
    "overloaded": "rate_limit_error",
    "failed": "api_error",
}


def error_body(refused: OrderRefused) -> Mapping[str, Any]:
    text = str(refused)
    if refused.kind == "context_length":
        # Clients of this API know it by these words.
        text = f"prompt is too long: {text}"
    return {"type": "error", "error": {"type": _ERROR_TYPE[refused.kind], "message": text}, "request_id": None}


def _messages(fields: _Body) -> list[ChatMessage]:
    messages = []
    if system := _system_text(fields.system, "system"):
        messages.append(ChatMessage("system", system))
    for at, message in enumerate(fields.messages):
        where = f"messages.{at}"
        if message.role == "system":
            if text := _system_text(message.content, where):
                messages.append(ChatMessage("system", text))
        elif isinstance(message.content, str):
            messages.append(ChatMessage(message.role, message.content))
        elif message.role == "user":
            messages += _user_messages(message.content, where)
        else:
            messages.append(_assistant_message(message.content, where))
    return messages


def _system_text(content: Parts, where: str) -> str:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    texts = [joined_text([block], where) for block in blocks]
    return "".join(text for text in texts if not text.startswith(_CHANGING_LINE))


def _user_messages(blocks: list[dict[str, Any]], where: str) -> list[ChatMessage]:
    results, said = [], []
    for block in blocks:
        if block.get("type") != "tool_result":
            said.append(_document_text(block))
            continue
        content = block.get("content")
        if isinstance(content, list):
            content = [part for part in content if part.get("type") != "tool_reference"]
        text = joined_text(content if isinstance(content, str | list) else None, where)
        results.append(ChatMessage("tool", text, call_id=str(block.get("tool_use_id") or "")))
    said = [block for block in said if block.get("text") != ""]
    return [*results, ChatMessage("user", joined_text(said, where))] if said else results


def _document_text(block: dict[str, Any]) -> dict[str, Any]:
    """A document that is plain text as a text; any other block as it is."""
    source = block.get("source")
    if block.get("type") == "document" and isinstance(source, Mapping) and source.get("type") == "text":
        return {"type": "text", "text": source.get("data")}
    return block


def _assistant_message(blocks: list[dict[str, Any]], where: str) -> ChatMessage:
    thinking, texts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thinking.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            calls.append(CalledTool(str(block.get("name") or ""), arguments, str(block.get("id") or "")))
        elif kind != "redacted_thinking" and block.get("text") != "":
            texts.append(block)
    return ChatMessage("assistant", joined_text(texts, where), "".join(thinking), tuple(calls))


def _tools(given: list[dict[str, Any]] | tuple[()]) -> OfferedTools:
    tools = OfferedTools()
    for at, tool in enumerate(given):
        # Tools of a type of the API's own have no schema: they run at its vendor, or only its models know them.
        if tool.get("type") in (None, "custom"):
            function = {**tool, "parameters": tool.get("input_schema")}
            tools.add_function(function, f"tools.{at}")
    return tools


def _tool_choice(choice: Mapping[str, Any] | None, tools: OfferedTools) -> str:
    kind = (choice or {}).get("type", "auto")
    if kind == "tool":
        return tools.choice_of((choice or {}).get("name"), "tool_choice")
    known = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in known:
        raise BadInput(f"tool_choice: type {kind!r} is not supported: use auto, any, tool or none")
    return known[kind]


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A request for a message."""

    order: StepOrder
    model: str

    def response(self, answer: StepAnswer) -> Mapping[str, Any]:
        choice = answer.choices[0]
        message = choice.message
        blocks: list[dict[str, Any]] = []
        if message.thinking:
            blocks.append({"type": "thinking", "thinking": message.thinking, "signature": ""})
        if message.content or not message.calls:
            blocks.append({"type": "text", "text": message.content})
        blocks += [{**_tool_use(call), "input": object_of(call.arguments)} for call in message.calls]
        return {**_head(self.model), "content": blocks, **_ending(choice), "usage": _usage(answer)}

    def events(self) -> MessageEvents:
        return MessageEvents(self)


class MessageEvents:
    """One message as events of its blocks."""

    told_in_stream: frozenset[RefusalKind] = frozenset()

    def __init__(self, request: MessagesRequest) -> None:
        self._request = request
        self._block = -1
        self._open: str = ""

    def opening(self) -> bytes:
        message = {
            **_head(self._request.model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            # The prompt is counted when the step runs: the last event of the message has the numbers.
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        return event({"type": "message_start", "message": message}, "message_start")

    def alive(self) -> bytes:
        return event({"type": "ping"}, "ping")

    def part(self, choice: int, part: TextPart) -> bytes:
        if part.kind == "thinking":
            begun = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return begun + self._delta({"type": "thinking_delta", "thinking": part.text})
        begun = self._begin("text", {"type": "text", "text": ""})
        return begun + self._delta({"type": "text_delta", "text": part.text})

    def ending(self, answer: StepAnswer) -> bytes:
        choice, sent = answer.choices[0], b""
        for call in choice.message.calls:
            sent += self._end_block() + self._begin("tool_use", {**_tool_use(call), "input": {}})
            arguments = json.dumps(object_of(call.arguments), ensure_ascii=False)
            sent += self._delta({"type": "input_json_delta", "partial_json": arguments})
        if self._block < 0:
            sent += self._begin("text", {"type": "text", "text": ""})
        sent += self._end_block()
        delta = {"type": "message_delta", "delta": _ending(choice), "usage": _usage(answer)}
        return sent + event(delta, "message_delta") + event({"type": "message_stop"}, "message_stop")

    def failure(self, refused: OrderRefused) -> bytes:
        return event(error_body(refused), "error")

    def _begin(self, kind: str, block: Mapping[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        ended = self._end_block()
        self._block, self._open = self._block + 1, kind
        start = {"type": "content_block_start", "index": self._block, "content_block": block}
        return ended + event(start, "content_block_start")

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        data = {"type": "content_block_delta", "index": self._block, "delta": delta}
        return event(data, "content_block_delta")

    def _end_block(self) -> bytes:
        if not self._open:
            return b""
        signature = self._delta({"type": "signature_delta", "signature": ""}) if self._open == "thinking" else b""
        self._open = ""
        stop = {"type": "content_block_stop", "index": self._block}
        return signature + event(stop, "content_block_stop")


def _head(model: str) -> dict[str, Any]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}


def _tool_use(call: CalledTool) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.call_id, "name": call.name}


def _ending(choice: Choice) -> dict[str, Any]:
    if choice.stopped_by and not choice.calls:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stopped_by}
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[choice.finish_reason]
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(answer: StepAnswer) -> dict[str, Any]:
    # In this API cached tokens are not among the input's.
    return {
        "input_tokens": max(0, answer.prompt_tokens - answer.cached_tokens),
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.generated_tokens,
    }
