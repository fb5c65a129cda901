"""The loop of an agent that calls tools and answers, for any chat model.

Each reply of the model either calls tools (all are run in order, and their texts are returned as tool messages), or
is final, or gets a reminder. The loop is bounded by its own steps and by `ctx.done`. An error in a call is returned
to the model as text; it never ends the trajectory.
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
    """A text argument by name.

    Raises
    ------
    WrongArguments
        The argument is missing or no text.
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
