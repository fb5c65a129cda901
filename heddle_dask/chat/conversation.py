"""A conversation as agents send it: messages with thinking and calls of tools, and what a message means."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

MessageRole = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class CalledTool:
    """One call of a tool in an assistant's message.

    Attributes
    ----------
    arguments
        JSON text, as it was written.
    call_id
        By which the message with its result names it; agents and dialects make their own.
    """

    name: str
    arguments: str
    call_id: str = ""

    @property
    def meaning(self) -> tuple[str, str]:
        """Equal for calls that do the same: spacing, key order, escapes and id do not count."""
        return self.name, _canonical(self.arguments)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    Attributes
    ----------
    thinking
        What an assistant thought before it spoke; many agents leave it out when they send the message back.
    calls
        The tools that an assistant called.
    call_id
        Of a tool's message: the call that it answers.
    name
        Of a tool's message: the tool, where the agent says so.
    """

    role: MessageRole
    content: str = ""
    thinking: str = ""
    calls: tuple[CalledTool, ...] = ()
    call_id: str = ""
    name: str = ""

    @property
    def meaning(self) -> tuple[Any, ...]:
        """Equal for messages that say and do the same.

        White space around a content, the text of arguments, ids and the thinking do not count: agents change them on
        the way, and what was sampled is kept anyway.
        """
        return self.role, self.content.strip(), tuple(call.meaning for call in self.calls)

    def for_template(self) -> dict[str, Any]:
        """The message in the form that chat templates read: arguments of calls are objects."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "function": {"name": call.name, "arguments": _object(call.arguments)},
                    **({"id": call.call_id} if call.call_id else {}),
                }
                for call in self.calls
            ]
        if self.role == "tool":
            message |= {key: value for key, value in (("tool_call_id", self.call_id), ("name", self.name)) if value}
        return message


def with_tool_names(messages: Sequence[ChatMessage], earlier: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages; results of tools that have no name get that of the call in `earlier` which they answer."""
    names = {call.call_id: call.name for message in earlier for call in message.calls if call.call_id}
    return [
        replace(message, name=names.get(message.call_id, ""))
        if message.role == "tool" and not message.name
        else message
        for message in messages
    ]


def _object(arguments: str) -> Any:
    """The arguments as an object; text that is no JSON object as it is."""
    try:
        value = json.loads(arguments or "{}", strict=False)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _canonical(arguments: str) -> str:
    value = _object(arguments)
    return arguments.strip() if isinstance(value, str) else json.dumps(value, sort_keys=True)
