"""A sampled turn as an agent reads it: its thinking, what it says, and the tools that it calls.

Calls are those that the engine's own parsers have read, where it has them, else those in the form of Hermes. A turn
with a call that cannot be read is all text: the agent sees what was written. Where an order forces a call, the turn is
JSON of a schema made here, as vLLM does it, whatever form the model has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from heddle_dask.chat.conversation import CalledTool, ChatMessage
from heddle_dask.chat.reply_parts import answer_of, parts_of
from heddle_dask.chat.tool_calls import OPEN, ToolCall, parse_calls
from heddle_dask.core.sampling import StructuredOutput
from heddle_dask.environments.base import Reply
from heddle_dask.gateway.orders import Choice, OrderRefused, StepOrder

_NAMED = "tool:"
_ID_CHARS = 9  # the templates of Mistral take no other length


def choice_of(reply: Reply, order: StepOrder, name: str) -> Choice:
    """One turn that an order has sampled.

    Parameters
    ----------
    name
        Unique among the turns of a trajectory: the ids of its calls come from it.
    """
    text, stopped_by = _before_stop(reply.text, order.stop if reply.finish_reason == "stop" else ())
    thinking, answer = parts_of(text, thinking_opened=reply.thinking_opened)
    content, calls = answer, tuple[CalledTool, ...]()
    if order.tools and order.tool_choice != "none" and reply.finish_reason == "stop":
        content, called = _called(reply, order, text, answer, bool(stopped_by))
        calls = tuple(
            CalledTool(call.name, json.dumps(dict(call.arguments), ensure_ascii=False), _call_id(f"{name}/{number}"))
            for number, call in enumerate(called)
        )
    return Choice(
        ChatMessage("assistant", content, thinking, calls),
        "tool_calls" if calls else reply.finish_reason,
        reply.text,
        reply.token_ids,
        reply.logprobs,
        stopped_by,
    )


def form_of(order: StepOrder) -> StructuredOutput | None:
    """The form that the reply must have: what the order says, or what makes it call a tool.

    Raises
    ------
    OrderRefused
        The order forces a call of a tool that it has not.
    """
    if order.structured is not None or order.tool_choice in ("auto", "none"):
        return order.structured
    tools = {tool["function"]["name"]: tool["function"] for tool in json.loads(order.tools or "[]")}
    name = order.tool_choice.removeprefix(_NAMED)
    if order.tool_choice.startswith(_NAMED):
        if name not in tools:
            raise OrderRefused(f"tool_choice names {name!r}, which is none of the tools", "invalid_request")
        return StructuredOutput(json_schema=_parameters(tools[name]))
    if not tools:
        raise OrderRefused("tool_choice is required, but there are no tools", "invalid_request")
    return StructuredOutput(json_schema=_some_call(tools))


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return dict(function.get("parameters") or {"type": "object", "properties": {}})


def _some_call(tools: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The schema of a list of one or more calls."""
    definitions: dict[str, Any] = {}
    calls = []
    for name, function in tools.items():
        parameters = _parameters(function)
        definitions |= parameters.pop("$defs", {})  # references count from the top of the whole schema
        properties = {"name": {"type": "string", "enum": [name]}, "parameters": parameters}
        calls.append({"type": "object", "properties": properties, "required": ["name", "parameters"]})
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    return schema | ({"$defs": definitions} if definitions else {})


def _called(reply: Reply, order: StepOrder, text: str, answer: str, cut: bool) -> tuple[str, Sequence[ToolCall]]:
    """What the turn says beside its calls, and the calls."""
    if order.tool_choice not in ("auto", "none") and order.structured is None:
        forced = _forced(answer or text, order.tool_choice.removeprefix(_NAMED))
        if forced:
            return "", forced
    read = None if cut else reply.read
    found = list(read.calls) if read is not None and read.calls else parse_calls(answer)
    calls = [call for call in found if isinstance(call, ToolCall)]
    if not calls or len(calls) < len(found):
        return answer, ()
    content = answer_of(read.content) if read is not None and read.calls else answer.partition(OPEN)[0].rstrip()
    return content, calls


def _forced(text: str, name: str) -> list[ToolCall]:
    """Calls in the form that `form_of` has asked for; none where an engine has ignored it."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return []
    if isinstance(value, dict) and name != "required":
        return [ToolCall(name, value)]
    items = value if isinstance(value, list) else []
    calls = [(each.get("name"), each.get("parameters")) for each in items if isinstance(each, dict)]
    return [ToolCall(name, given) for name, given in calls if isinstance(name, str) and isinstance(given, dict)]


def _before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """The text before the first stop text, and that text; all of it where there is none."""
    found = min(((at, each) for each in stop if (at := text.find(each)) >= 0), default=None)
    return (text, "") if found is None else (text[: found[0]], found[1])


def _call_id(name: str) -> str:
    return blake2b(name.encode(), digest_size=8).hexdigest()[:_ID_CHARS]
