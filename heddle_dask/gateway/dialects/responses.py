"""OpenAI's Responses: requests and answers. This module is an `AgentDialect`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from heddle_dask.chat.conversation import ChatMessage
from heddle_dask.core.errors import BadInput
from heddle_dask.gateway.dialects.contract import KeptConversations
from heddle_dask.gateway.dialects.offered_tools import OfferedTools, named_choices
from heddle_dask.gateway.dialects.openai_errors import openai_error
from heddle_dask.gateway.dialects.reading import (
    ApiFields,
    read_fields,
    sampling_fields,
    structured_of,
    template_text,
)
from heddle_dask.gateway.dialects.response_events import ResponseEvents
from heddle_dask.gateway.dialects.response_items import (
    ReadItems,
    call_item,
    message_item,
    new_id,
    reasoning_item,
)
from heddle_dask.gateway.orders import StepAnswer, StepOrder


class _Reasoning(ApiFields):
    effort: str | None = None


class _Text(ApiFields):
    format: dict[str, Any] | None = None


class _Body(ApiFields):
    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def read_request(body: bytes, kept: KeptConversations) -> ResponsesRequest:
    fields = read_fields(_Body, body)
    for name in ("background", "conversation", "prompt"):
        if getattr(fields, name):
            raise BadInput(f"{name}: not supported")
    tools = _tools(fields.tools or [])
    form = fields.text.format if fields.text else None
    order = StepOrder(
        messages=_messages(fields, kept),
        tools=tools.text,
        tool_choice=_tool_choice(fields.tool_choice, tools),
        structured=structured_of(form, (form or {}).get("schema"), "text.format"),
        template=template_text(fields.chat_template_kwargs, fields.reasoning.effort if fields.reasoning else None),
        streams=bool(fields.stream),
        **sampling_fields(
            max_tokens=fields.max_output_tokens,
            temperature=fields.temperature,
            top_p=fields.top_p,
            top_k=fields.top_k,
            stop=fields.stop,
        ),
    )
    return ResponsesRequest(order, tools, _echoed(fields, order), None if fields.store is False else kept)


error_body = openai_error


def _messages(fields: _Body, kept: KeptConversations) -> tuple[ChatMessage, ...]:
    items = ReadItems()
    if fields.instructions:
        items.messages.append(ChatMessage("system", fields.instructions))
    if fields.previous_response_id:
        earlier = kept.conversation(fields.previous_response_id)
        # The instructions of a response are not those of the next.
        items.messages += [message for message in earlier if message.role != "system"]
    given = fields.input if fields.input is not None else []
    if isinstance(given, str):
        items.messages.append(ChatMessage("user", given))
    else:
        for at, item in enumerate(given):
            items.add(item, f"input.{at}")
    if not any(message.role != "system" for message in items.messages):
        raise BadInput("input: at least one item is needed")
    return tuple(items.messages)


def _tools(given: list[dict[str, Any]]) -> OfferedTools:
    tools = OfferedTools()
    for at, tool in enumerate(given):
        where, kind = f"tools.{at}", tool.get("type")
        if kind == "function":
            tools.add_function(tool, where)
        elif kind == "custom":
            tools.add_custom(tool, where)
        elif kind == "local_shell":
            tools.add_local_shell()
        elif kind == "namespace":
            for inner in tool.get("tools") or []:
                if isinstance(inner, dict) and inner.get("type") == "function":
                    tools.add_function(inner, where, namespace=str(tool.get("name") or ""))
    return tools


def _tool_choice(choice: str | dict[str, Any] | None, tools: OfferedTools) -> str:
    if choice is None or choice in ("auto", "none", "required"):
        return choice if isinstance(choice, str) else "auto"
    if not isinstance(choice, dict):
        raise BadInput(f"tool_choice is {choice!r}: use auto, none, required, or an object that names a tool")
    if choice.get("type") == "allowed_tools":
        names = list(named_choices(choice))
        if choice.get("mode") != "required":
            return "auto"
        return tools.choice_of(names[0], "tool_choice") if len(names) == 1 else "required"
    name = choice.get("name") or (choice.get("type") if choice.get("type") == "local_shell" else None)
    return tools.choice_of(name, "tool_choice")


def _echoed(fields: _Body, order: StepOrder) -> dict[str, Any]:
    """What a response repeats of its request."""
    return {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "model": fields.model or "",
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": fields.reasoning.effort if fields.reasoning else None, "summary": None},
        "store": fields.store is not False,
        "temperature": order.temperature,
        "text": {"format": (fields.text.format if fields.text else None) or {"type": "text"}},
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools or [],
        "top_p": order.top_p,
        "truncation": "disabled",
    }


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request for a response.

    Attributes
    ----------
    kept
        Where the conversation is kept for a later request; None: it is not.
    """

    order: StepOrder
    tools: OfferedTools
    echoed: Mapping[str, Any]
    kept: KeptConversations | None
    response_id: str = field(default_factory=lambda: new_id("resp"))
    created_s: int = field(default_factory=lambda: int(time.time()))

    def response(self, answer: StepAnswer) -> Mapping[str, Any]:
        return self.ended(answer, self._output(answer))

    def events(self) -> ResponseEvents:
        return ResponseEvents(self)

    def begun(self) -> dict[str, Any]:
        """The response while its step runs."""
        return self._body("in_progress", [])

    def failed(self, error: Mapping[str, Any]) -> dict[str, Any]:
        return self._body("failed", [], error=error)

    def ended(self, answer: StepAnswer, output: list[dict[str, Any]]) -> dict[str, Any]:
        """The response with its output; its conversation is kept for the next."""
        choice = answer.choices[0]
        if self.kept is not None:
            self.kept.keep(self.response_id, (*self.order.messages, choice.message))
        cut = choice.finish_reason == "length"
        body = self._body("incomplete" if cut else "completed", output)
        body["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        body["usage"] = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": answer.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.generated_tokens,
        }
        return body

    def _output(self, answer: StepAnswer) -> list[dict[str, Any]]:
        choice = answer.choices[0]
        message, output = choice.message, []
        if message.thinking:
            output.append(reasoning_item(message.thinking, new_id("rs")))
        if message.content or not message.calls:
            status = "incomplete" if choice.finish_reason == "length" else "completed"
            output.append(message_item(message.content, new_id("msg"), status=status))
        return output + [call_item(call, self.tools) for call in message.calls]

    def _body(
        self, status: str, output: list[dict[str, Any]], error: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "error": error,
            "incomplete_details": None,
            "output": output,
            "usage": None,
            **self.echoed,
        }
