"""Tool calls in the text of a chat model: the Hermes and Qwen form, read and written.

A call is ``<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>``. Reading
never raises: an invalid call becomes a `MalformedCall` with a text for the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heddle_dask.core.errors import encodable_value

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_NO_ARGUMENTS = '"arguments" must be a JSON object'
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
    return _named_call(name, call.get("arguments", {}))


@dataclass(frozen=True, slots=True)
class ReadReply:
    """A reply as the parsers of an engine have read it: what it says, and its calls."""

    content: str
    calls: tuple[ToolCall | MalformedCall, ...]

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> ReadReply:
        """From an assistant's message in the form of OpenAI's API."""
        calls = [call["function"] for call in message.get("tool_calls") or []]
        return cls(message.get("content") or "", tuple(_named_call(call["name"], call["arguments"]) for call in calls))


def _named_call(name: str, arguments: object) -> ToolCall | MalformedCall:
    if isinstance(arguments, str):
        # As in OpenAI's API; some models write it so.
        arguments, _ = _load_object(arguments)
    return ToolCall(name, arguments) if isinstance(arguments, dict) else MalformedCall(_NO_ARGUMENTS)


def _load_object(body: str) -> tuple[dict[str, Any] | None, str]:
    """The JSON object in `body`, or None and the reason."""
    try:
        # strict=False: models often write code with bare line breaks inside the string.
        value = encodable_value(json.loads(body, strict=False))
    except json.JSONDecodeError as error:
        return None, f"{error.msg} at {error.pos}"
    except (RecursionError, ValueError):
        return None, "too deep or too large"
    return (value, "") if isinstance(value, dict) else (None, "not an object")
