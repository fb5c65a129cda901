"""OpenAI's chat completions: requests, answers, streams and errors. This module is an `AgentDialect`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from heddle_dask.chat.conversation import CalledTool, ChatMessage
from heddle_dask.core.errors import BadInput
from heddle_dask.core.sampling import StructuredOutput
from heddle_dask.gateway.dialects.contract import KeptConversations, compact, event
from heddle_dask.gateway.dialects.offered_tools import OfferedTools, free_text_arguments, free_text_of, named_choices
from heddle_dask.gateway.dialects.openai_errors import openai_error
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


class _Function(ApiFields):
    name: str = ""
    arguments: str | dict[str, Any] | None = None


class _Custom(ApiFields):
    name: str = ""
    input: str = ""


class _Call(ApiFields):
    id: str | None = None
    function: _Function | None = None
    custom: _Custom | None = None


class _Message(ApiFields):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Parts = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None
    tool_call_id: str | None = None


class _StreamOptions(ApiFields):
    include_usage: bool | None = None


class _Body(ApiFields):
    messages: list[_Message]
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    functions: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None


def read_request(body: bytes, _kept: KeptConversations) -> ChatRequest:
    fields = read_fields(_Body, body)
    if not fields.messages:
        raise BadInput("messages: at least one message is needed")
    if "audio" in (fields.modalities or ()):
        raise BadInput("modalities: audio is not supported: use text")
    tools = _tools(fields)
    order = StepOrder(
        messages=tuple(_message(message, f"messages.{at}") for at, message in enumerate(fields.messages)),
        tools=tools.text,
        tool_choice=_tool_choice(fields, tools),
        structured=_structured(fields),
        template=template_text(fields.chat_template_kwargs, fields.reasoning_effort),
        streams=bool(fields.stream),
        **sampling_fields(
            max_tokens=fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens,
            temperature=fields.temperature,
            top_p=fields.top_p,
            top_k=fields.top_k,
            min_p=fields.min_p,
            seed=fields.seed,
            stop=fields.stop,
            n=fields.n,
        ),
    )
    usage = bool(fields.stream_options and fields.stream_options.include_usage)
    return ChatRequest(order, fields.model or "", bool(fields.logprobs), usage, tools, bool(fields.functions))


error_body = openai_error


def _message(message: _Message, where: str) -> ChatMessage:
    text = joined_text(message.content, where)
    if message.role == "assistant":
        calls = [_called(call, where) for call in message.tool_calls or ()]
        if message.function_call is not None:
            calls.append(_called(_Call(function=message.function_call), where))
        thinking = message.reasoning_content or message.reasoning or ""
        return ChatMessage("assistant", text, thinking, tuple(calls))
    if message.role in ("tool", "function"):
        return ChatMessage("tool", text, call_id=message.tool_call_id or "", name=message.name or "")
    return ChatMessage("user" if message.role == "user" else "system", text)


def _called(call: _Call, where: str) -> CalledTool:
    if call.custom is not None:
        return CalledTool(call.custom.name, free_text_arguments(call.custom.input), call.id or "")
    if call.function is None or not call.function.name:
        raise BadInput(f"{where}: a tool call needs a function with a name")
    arguments = call.function.arguments
    return CalledTool(
        call.function.name, compact(arguments) if isinstance(arguments, dict) else arguments or "{}", call.id or ""
    )


def _tools(fields: _Body) -> OfferedTools:
    tools = OfferedTools()
    for at, tool in enumerate(fields.tools or ()):
        where = f"tools.{at}"
        kind = tool.get("type", "function")
        inner = tool.get(kind) if kind in ("function", "custom") else None
        if not isinstance(inner, dict):
            raise BadInput(f"{where}: use type function or custom, with an object of that name")
        if kind == "custom":
            tools.add_custom(inner, where)
        else:
            tools.add_function(inner, where)
    for at, function in enumerate(fields.functions or ()):
        tools.add_function(function, f"functions.{at}")
    return tools


def _tool_choice(fields: _Body, tools: OfferedTools) -> str:
    choice = fields.function_call if fields.tool_choice is None else fields.tool_choice
    if choice is None or choice in ("auto", "none"):
        return choice if isinstance(choice, str) else "auto"
    if choice == "required":
        return "required"
    if not isinstance(choice, dict):
        raise BadInput(f"tool_choice is {choice!r}: use auto, none, required, or an object that names a tool")
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools") or choice
        names = list(named_choices(allowed))
        required = allowed.get("mode") == "required"
        return (
            tools.choice_of(names[0], "tool_choice")
            if required and len(names) == 1
            else ("required" if required else "auto")
        )
    named = choice.get("function") or choice.get("custom") or choice
    return tools.choice_of(named.get("name"), "tool_choice")


def _structured(fields: _Body) -> StructuredOutput | None:
    if fields.structured_outputs is not None:
        given = {"json_schema" if key == "json" else key: value for key, value in fields.structured_outputs.items()}
        known = {key: value for key, value in given.items() if key in StructuredOutput.__slots__ and value is not None}
        return StructuredOutput(**known)
    form = fields.response_format
    inner = (form or {}).get("json_schema")
    return structured_of(form, inner.get("schema") if isinstance(inner, dict) else None, "response_format")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for a chat completion.

    Attributes
    ----------
    legacy
        Whether its tools are ``functions``, the first form of this API.
    """

    order: StepOrder
    model: str
    logprobs: bool
    usage: bool
    tools: OfferedTools
    legacy: bool = False

    def response(self, answer: StepAnswer) -> Mapping[str, Any]:
        return {
            "id": _new_id(),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [
                {
                    "index": at,
                    "message": {"role": "assistant", "refusal": None, **self._said(choice)},
                    "logprobs": self._logprobs(choice),
                    "finish_reason": self._finish(choice),
                }
                for at, choice in enumerate(answer.choices)
            ],
            "usage": _usage(answer),
        }

    def events(self) -> ChatEvents:
        return ChatEvents(self)

    def _said(self, choice: Choice) -> dict[str, Any]:
        message = choice.message
        said: dict[str, Any] = {"content": message.content or (None if message.calls else "")}
        if message.thinking:
            said |= _thinking(message.thinking)
        return said | self._calls(choice, indexed=False)

    def _calls(self, choice: Choice, *, indexed: bool) -> dict[str, Any]:
        calls = choice.message.calls
        if not calls:
            return {}
        if self.legacy:
            return {"function_call": {"name": calls[0].name, "arguments": calls[0].arguments}}
        return {"tool_calls": [self._call(at, call, indexed=indexed) for at, call in enumerate(calls)]}

    def _call(self, at: int, call: CalledTool, *, indexed: bool) -> dict[str, Any]:
        head: dict[str, Any] = {"index": at} if indexed else {}
        if self.tools.kind_of(call.name) == "custom":
            custom = {"name": call.name, "input": free_text_of(call.arguments)}
            return {**head, "id": call.call_id, "type": "custom", "custom": custom}
        function = {"name": call.name, "arguments": call.arguments}
        return {**head, "id": call.call_id, "type": "function", "function": function}

    def _finish(self, choice: Choice) -> str:
        return "function_call" if self.legacy and choice.finish_reason == "tool_calls" else choice.finish_reason

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Of each sampled token; tokens are named as vLLM names them where it is asked for ids."""
        if not self.logprobs:
            return None
        entries: list[dict[str, Any]] = [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(choice.token_ids, choice.logprobs, strict=False)
        ]
        return {"content": entries, "refusal": None}


class ChatEvents:
    """One chat completion as chunks."""

    told_in_stream: frozenset[RefusalKind] = frozenset()

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._head = {
            "id": _new_id(),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }

    def opening(self) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(at, first) for at in range(self._request.order.n))

    def alive(self) -> bytes:
        return b": the step is still to come\n\n"

    def part(self, choice: int, part: TextPart) -> bytes:
        return self._chunk(choice, _thinking(part.text) if part.kind == "thinking" else {"content": part.text})

    def ending(self, answer: StepAnswer) -> bytes:
        request, chunks = self._request, []
        for at, choice in enumerate(answer.choices):
            if calls := request._calls(choice, indexed=True):
                chunks.append(self._chunk(at, calls))
            chunks.append(self._chunk(at, {}, request._finish(choice), request._logprobs(choice)))
        if request.usage:
            chunks.append(event({**self._head, "choices": [], "usage": _usage(answer)}))
        return b"".join([*chunks, b"data: [DONE]\n\n"])

    def failure(self, refused: OrderRefused) -> bytes:
        return event(openai_error(refused)) + b"data: [DONE]\n\n"

    def _chunk(
        self, at: int, delta: Mapping[str, Any], finish: str | None = None, logprobs: Mapping[str, Any] | None = None
    ) -> bytes:
        choice = {"index": at, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event({**self._head, "choices": [choice]})


def _thinking(text: str) -> dict[str, Any]:
    # Two names are in use: vLLM's own, and DeepSeek's, which more clients read.
    return {"reasoning_content": text, "reasoning": text}


def _usage(answer: StepAnswer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.generated_tokens,
        "total_tokens": answer.prompt_tokens + answer.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _new_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"
