"""The loop of an agent that thinks, calls tools and answers: works with any chat model.

Each reply of the model either calls tools (all are run in order, their texts come back as tool
messages), or is final, or gets a reminder. The loop is bounded by its own steps and by `ctx.done`.
What goes wrong in a call comes back to the model as text; it never ends the trajectory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from heddle_dask.environments.base import ActionFailed, Context
from heddle_dask.environments.tool_calls import MalformedCall, ToolCall, parse_calls

Tool = Callable[[Mapping[str, Any]], Awaitable[str]]
"""Takes the arguments of a call and returns the text for the model."""


class WrongArguments(Exception):
    """The arguments of a tool call do not fit the tool; the message is for the model."""


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """Bounds of one trajectory and of what a tool may put into the context.

    Attributes
    ----------
    max_steps
        LLM steps at most.
    reply_tokens
        Tokens of one reply at most; None: as the run's budget says.
    calls_per_reply
        Calls run of one reply; further ones are refused.
    tool_text_chars
        Longest tool text; of a longer one its end is kept, where Python names the error.
    """

    max_steps: int = 24
    reply_tokens: int | None = None
    calls_per_reply: int = 4
    tool_text_chars: int = 400


def text_argument(arguments: Mapping[str, Any], name: str) -> str:
    """A text argument by name.

    Raises
    ------
    WrongArguments
        It is missing or no text.
    """
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
    """Let the model work until it gives a final reply.

    Parameters
    ----------
    is_final
        Whether a reply without tool calls ends the trajectory.
    reminder
        User message after a reply that is neither a call nor final.

    Returns
    -------
    str or None
        The final reply; None when steps or budget ran out first.
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
    """Text for the model: what the tool says, or what is wrong with the call."""
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
