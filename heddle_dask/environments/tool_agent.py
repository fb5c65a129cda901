"""Tool calls in the text of a chat model: the Hermes and Qwen form, read and written.

A call is ``<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>``. Reading
never raises: an invalid call becomes a `MalformedCall` with a text for the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from heddle_dask.environments.base import ActionFailed, Context

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_BLOCK = re.compile(re.escape(OPEN) + r"(.*?)(" + re.escape(CLOSE) + r"|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One well-formed call: a tool's name and its arguments by name."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """An invalid call; `reason` is one line addressed to the model."""

    reason: str


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Text of a call in the form that `parse_calls` reads."""
    body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"{OPEN}\n{body}\n{CLOSE}"


def parse_calls(text: str) -> list[ToolCall | MalformedCall]:
    """All calls in a reply, in order; empty if there is none."""
    return [_parse_block(match[1], closed=bool(match[2])) for match in _BLOCK.finditer(text)]


def _parse_block(body: str, *, closed: bool) -> ToolCall | MalformedCall:
    if not closed:
        return MalformedCall(f"tool call without {CLOSE}")
    call, reason = _load_object(body)
    if call is None:
        return MalformedCall(f"tool call is not JSON: {reason}")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall('tool call needs a "name"')
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        # Some models write the arguments as a JSON string, as in OpenAI's API.
        arguments, _ = _load_object(arguments)
    if not isinstance(arguments, dict):
        return MalformedCall('"arguments" must be a JSON object')
    return ToolCall(name, arguments)


def _load_object(body: str) -> tuple[dict[str, Any] | None, str]:
    """The JSON object in `body`, or None and the reason."""
    try:
        # strict=False: models often write code with bare line breaks inside the string.
        value = json.loads(body, strict=False)
    except json.JSONDecodeError as error:
        return None, f"{error.msg} at {error.pos}"
    except (RecursionError, ValueError):
        return None, "too deep or too large"
    return (value, "") if isinstance(value, dict) else (None, "not an object")


# The loop of an agent that calls tools and answers, for any chat model.
#
# Each reply of the model either calls tools (all are run in order, and their texts are returned as tool messages), or
# is final, or gets a reminder. The loop is bounded by its own steps and by `ctx.done`. An error in a call is returned
# to the model as text; it never ends the trajectory.


Tool = Callable[[Mapping[str, Any]], Awaitable[str]]
"""Takes the arguments of a call and returns the text for the model."""


class WrongArguments(Exception):
    """The arguments of a tool call do not fit the tool; the message is for the model."""


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """Limits of one trajectory and of the tool texts in its context.

    Attributes
    ----------
    max_steps
        Maximum number of LLM steps.
    reply_tokens
        Maximum number of tokens of one reply; None: the limit of the run's budget.
    calls_per_reply
        Maximum number of calls that are run from one reply; further ones are refused.
    tool_text_chars
        Maximum number of characters of a tool text; of a longer one the end is kept, which has the error in a Python
        traceback.
    """

    max_steps: int = 24
    reply_tokens: int | None = None
    calls_per_reply: int = 4
    tool_text_chars: int = 400


def text_argument(arguments: Mapping[str, Any], name: str) -> str:
    """A text argument by name."""
    value = arguments.get(name)
    if not isinstance(value, str):
        raise WrongArguments(f'needs the text argument "{name}"')
    return value


async def converse(
    ctx: Context,
    tools: Mapping[str, Tool],
    is_final: Callable[[str], bool],
    *,
    reminder: str,
    limits: LoopLimits,
) -> str | None:
    """Run the model and its tool calls until it gives a final reply.

    Parameters
    ----------
    is_final
        Whether a reply without tool calls ends the trajectory.
    reminder
        User message after a reply that neither calls a tool nor is final.

    Returns
    -------
    str or None
        The final reply; None if steps or budget ran out first.
    """
    for _ in range(limits.max_steps):
        if ctx.done:
            return None
        reply = await ctx.generate(max_tokens=limits.reply_tokens)
        calls = parse_calls(reply.text)
        if calls:
            for call in calls[: limits.calls_per_reply]:
                text = await _answer(call, tools)
                ctx.append("tool", _shorten(text, limits.tool_text_chars))
            for _ in calls[limits.calls_per_reply :]:
                ctx.append("tool", f"error: at most {limits.calls_per_reply} calls per reply")
        elif is_final(reply.text):
            return reply.text
        else:
            ctx.append("user", reminder)
    return None


async def _answer(call: ToolCall | MalformedCall, tools: Mapping[str, Tool]) -> str:
    """Text for the model: the tool's result, or the error in the call."""
    if isinstance(call, MalformedCall):
        return f"error: {call.reason}"
    tool = tools.get(call.name)
    if tool is None:
        return f"error: no tool {call.name!r}; there is {', '.join(tools)}"
    try:
        return await tool(call.arguments)
    except WrongArguments as error:
        return f"error: {call.name} {error}"
    except ActionFailed as error:
        return f"error: {call.name} failed: {error}"


def _shorten(text: str, limit_chars: int) -> str:
    return text if len(text) <= limit_chars else "[...] " + text[-limit_chars:]
