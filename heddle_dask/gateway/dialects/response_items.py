"""Items of OpenAI's Responses: a conversation as items, and items as messages.

One turn of an assistant is several items: its reasoning, what it says, and each call. Items that follow one another and
may be of one turn are one message.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from heddle_dask.chat.conversation import CalledTool, ChatMessage
from heddle_dask.core.errors import BadInput
from heddle_dask.gateway.dialects.offered_tools import (
    LOCAL_SHELL,
    OfferedTools,
    flat_name,
    free_text_arguments,
    free_text_of,
    object_of,
)
from heddle_dask.gateway.dialects.reading import joined_text

_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})
# Of tools that run at the API's vendor, and notes of it: the model was told of none of them.
_LEFT_OUT = frozenset({"web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call"})


@dataclass(slots=True)
class ReadItems:
    """The messages of items, in order."""

    messages: list[ChatMessage] = field(default_factory=list)

    def add(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._add_message(item, where)
        elif kind == "reasoning":
            self._add_thinking(_reasoning_text(item))
        elif kind in _OUTPUTS:
            self._add_output(item, where)
        elif (call := _call_of(kind, item)) is not None:
            self._add_call(call)
        elif kind == "item_reference":
            raise BadInput(f"{where}: references to items are not supported: send the items, or previous_response_id")
        elif kind not in _LEFT_OUT:
            raise BadInput(f"{where}: items of type {str(kind)[:60]!r} are not supported")

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        role, content = item.get("role"), item.get("content")
        if content is not None and not isinstance(content, str | list):
            raise BadInput(f"{where}: content must be a text or a list of parts")
        text = joined_text(content, where)
        if role == "assistant":
            last = self.messages[-1] if self.messages else None
            if last is not None and last.role == "assistant" and not last.content and not last.calls:
                self.messages[-1] = replace(last, content=text)
            else:
                self.messages.append(ChatMessage("assistant", text))
        elif role == "user":
            self.messages.append(ChatMessage("user", text))
        elif role in ("system", "developer"):
            self._add_system(text)
        else:
            raise BadInput(f"{where}: role {str(role)[:60]!r} is not supported")

    def _add_system(self, text: str) -> None:
        """Instructions at the beginning are one message: many templates take no second one."""
        if len(self.messages) == 1 and self.messages[0].role == "system":
            self.messages[0] = ChatMessage("system", f"{self.messages[0].content}\n\n{text}")
        else:
            self.messages.append(ChatMessage("system", text))

    def _add_thinking(self, text: str) -> None:
        last = self.messages[-1] if self.messages else None
        if last is not None and last == ChatMessage("assistant", thinking=last.thinking):
            self.messages[-1] = replace(last, thinking=last.thinking + text)
        elif text:
            self.messages.append(ChatMessage("assistant", thinking=text))

    def _add_output(self, item: Mapping[str, Any], where: str) -> None:
        output = item.get("output")
        if isinstance(output, Mapping):  # of an older form: what was said, and whether it succeeded
            output = output.get("content")
        text = joined_text(output if isinstance(output, str | list) else None, where)
        self.messages.append(ChatMessage("tool", text, call_id=str(item.get("call_id") or item.get("id") or "")))

    def _add_call(self, call: CalledTool) -> None:
        last = self.messages[-1] if self.messages else None
        if last is not None and last.role == "assistant":
            self.messages[-1] = replace(last, calls=(*last.calls, call))
        else:
            self.messages.append(ChatMessage("assistant", calls=(call,)))


def _reasoning_text(item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


def _call_of(kind: object, item: Mapping[str, Any]) -> CalledTool | None:
    """The call of an item; None for an item that is none."""
    call_id = str(item.get("call_id") or item.get("id") or "")
    if kind == "function_call":
        name = flat_name(str(item.get("namespace") or ""), str(item.get("name") or ""))
        return CalledTool(name, str(item.get("arguments") or "{}"), call_id)
    if kind == "custom_tool_call":
        return CalledTool(str(item.get("name") or ""), free_text_arguments(str(item.get("input") or "")), call_id)
    if kind == "local_shell_call":
        action = item.get("action")
        shown = {name: action[name] for name in _SHELL_FIELDS if action.get(name) is not None} if action else {}
        return CalledTool(LOCAL_SHELL, json.dumps(shown, ensure_ascii=False), call_id)
    return None


_SHELL_FIELDS = ("command", "working_directory", "timeout_ms")


def reasoning_item(text: str, item_id: str, *, done: bool = True) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if done else []
    item = {"type": "reasoning", "id": item_id, "summary": [], "content": content, "encrypted_content": None}
    return {**item, "status": "completed" if done else "in_progress"}


def message_item(text: str, item_id: str, *, done: bool = True, status: str = "completed") -> dict[str, Any]:
    content = [text_part(text)] if done else []
    head = {"type": "message", "id": item_id, "role": "assistant"}
    return {**head, "status": status if done else "in_progress", "content": content}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(call: CalledTool, tools: OfferedTools) -> dict[str, Any]:
    """A call as the kind of tool that was offered."""
    kind = tools.kind_of(call.name)
    if kind == "custom":
        head = {"type": "custom_tool_call", "id": new_id("ctc"), "call_id": call.call_id, "status": "completed"}
        return {**head, "name": call.name, "input": free_text_of(call.arguments)}
    if kind == "local_shell":
        given = object_of(call.arguments)
        command = given.get("command")
        action = {"type": "exec", "command": command if isinstance(command, list) else [], "env": {}}
        action |= {name: given[name] for name in _SHELL_FIELDS[1:] if given.get(name) is not None}
        head = {"type": "local_shell_call", "id": new_id("lsh"), "call_id": call.call_id, "status": "completed"}
        return {**head, "action": action}
    namespace, name = tools.called_by(call.name)
    head = {"type": "function_call", "id": new_id("fc"), "call_id": call.call_id, "status": "completed"}
    spoken = {"name": name, "arguments": call.arguments}
    return {**head, **spoken, **({"namespace": namespace} if namespace else {})}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
