"""The loop of an agent that calls tools and answers, for any chat model.

Each reply of the model either calls tools (all are run in order, and their texts are returned as tool messages), or is
final, or gets a reminder. Only what is behind its thinking counts, and nothing of a reply that its limit has cut. The
loop is bounded by its own steps, by replies in a row of which nothing is usable, and by `ctx.done`. An error in a call
is returned to the model as text; it never ends the trajectory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from heddle_dask.chat.tool_calls import MalformedCall, ToolCall
from heddle_dask.environments.base import CUT, NO_PROGRESS, ActionFailed, Context

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
    useless_replies
        Maximum number of replies in a row that call no tool that there is and are not final; the trajectory then ends
        as truncated with the cause ``"no-progress"``.
    """

    max_steps: int = 24
    reply_tokens: int | None = None
    calls_per_reply: int = 4
    tool_text_chars: int = 400
    useless_replies: int = 8


def text_argument(arguments: Mapping[str, Any], name: str) -> str:
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
        What the final reply says; None if steps, budget or patience ran out first.
    """
    useless = 0
    for _ in range(limits.max_steps):
        if ctx.done:
            return None
        if useless >= limits.useless_replies:
            ctx.metadata[NO_PROGRESS] = f"{useless} replies in a row called no tool that there is and were not final"
            return None
        reply = await ctx.generate(max_tokens=limits.reply_tokens)
        useless += 1
        if reply.finish_reason == "length":
            ctx.append("user", CUT)
            continue
        calls = reply.calls
        if any(isinstance(call, ToolCall) and call.name in tools for call in calls):
            useless = 0
        for call in calls[: limits.calls_per_reply]:
            ctx.append("tool", shortened(await _answer(call, tools), limits.tool_text_chars))
        for _ in calls[limits.calls_per_reply :]:
            ctx.append("tool", f"error: at most {limits.calls_per_reply} calls per reply")
        if calls:
            continue
        if is_final(reply.answer):
            return reply.answer
        ctx.append("user", reminder)
    return None


async def _answer(call: ToolCall | MalformedCall, tools: Mapping[str, Tool]) -> str:
    """Text for the model: the tool's result, or the error in the call."""
    if isinstance(call, MalformedCall):
        return f"error: {call.reason}"
    tool = tools.get(call.name)
    if tool is None:
        return no_tool(call.name, tools)
    try:
        return await tool(call.arguments)
    except WrongArguments as error:
        return f"error: {call.name} {error}"
    except ActionFailed as error:
        return f"error: {call.name} failed: {error}"


def no_tool(name: str, tools: Iterable[str]) -> str:
    """Text for the model that has called a tool that there is not."""
    return f"error: no tool {name!r}; there is {', '.join(tools)}"


def shortened(text: str, limit_chars: int) -> str:
    """The text, or the end of a long one."""
    return text if len(text) <= limit_chars else "[...] " + text[-limit_chars:]
