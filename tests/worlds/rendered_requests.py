"""Requests of each dialect, whose rendering is compared with that of vLLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.gateway.dialects import chat, messages, responses
from heddle_dask.gateway.kept_responses import KeptResponses
from heddle_dask.gateway.orders import StepOrder

TEMPLATE = Path(__file__).parent / "agent_template.jinja"

_PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
_RUN = {"name": "run", "description": "Runs a command.", "parameters": _PARAMETERS}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls -l"}'}}

CHAT: dict[str, dict[str, Any]] = {
    "one message": {"messages": [{"role": "user", "content": "Hello, wörld!"}]},
    "parts": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        ]
    },
    "tools": {"messages": [{"role": "user", "content": "list"}], "tools": [{"type": "function", "function": _RUN}]},
    "a strict tool": {
        "messages": [{"role": "user", "content": "list"}],
        "tools": [{"type": "function", "function": {"strict": True, **_RUN, "unknown": 1}}],
    },
    "a tool without parameters": {
        "messages": [{"role": "user", "content": "now"}],
        "tools": [{"type": "function", "function": {"name": "now"}}],
    },
    "a turn of calls": {
        "messages": [
            {"role": "user", "content": "list"},
            {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "a.py"},
        ],
        "tools": [{"type": "function", "function": _RUN}],
    },
    "calls without content": {
        "messages": [
            {"role": "user", "content": "list"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "a.py"}]},
        ],
    },
    "no thinking": {"messages": [{"role": "user", "content": "4+4?"}], "reasoning_effort": "none"},
    "variables": {
        "messages": [{"role": "user", "content": "4+4?"}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
}
MESSAGES: dict[str, dict[str, Any]] = {
    "one message": {"messages": [{"role": "user", "content": "Hello!"}]},
    "system as text": {"system": "Be brief.", "messages": [{"role": "user", "content": "Hello!"}]},
    "system as blocks": {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=12345;"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief."},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    },
    "a turn of tools": {
        "messages": [
            {"role": "user", "content": "list"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "run", "input": {"command": "ls"}},
                    {"type": "tool_use", "id": "t2", "name": "run", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "a.py"},
                    {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "b"},
                                                                             {"type": "text", "text": "c"}]},
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
        "tools": [{"name": "run", "description": "Runs a command.", "input_schema": _PARAMETERS}],
    },
    "no thinking": {"messages": [{"role": "user", "content": "4+4?"}], "thinking": {"type": "disabled"}},
    "effort": {"messages": [{"role": "user", "content": "4+4?"}], "output_config": {"effort": "low"}},
}  # fmt: skip
RESPONSES: dict[str, dict[str, Any]] = {
    "a text": {"input": "Hello!"},
    "instructions": {"instructions": "Be brief.", "input": [{"role": "user", "content": "Hello!"}]},
    "a turn of calls": {
        "input": [
            {"type": "message", "role": "user", "content": "list"},
            {"type": "reasoning", "id": "rs_1", "summary": [],
             "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "run", "arguments": '{"command": "ls"}'},
            {"type": "function_call", "call_id": "c2", "name": "find", "namespace": "mcp", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "*** Begin"},
            {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
            {"type": "function_call_output", "call_id": "c2", "output": "b.py"},
            {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"},
        ],
        "tools": [
            {"type": "function", **_RUN},
            {"type": "custom", "name": "patch", "description": "Patches."},
            {"type": "namespace", "name": "mcp", "description": "A server.",
             "tools": [{"type": "function", "name": "find", "description": "Finds.", "parameters": _PARAMETERS}]},
            {"type": "web_search"},
        ],
    },
    "effort": {"input": "4+4?", "reasoning": {"effort": "none"}},
}  # fmt: skip
DIALECTS = {
    "/v1/chat/completions": (chat, CHAT),
    "/v1/messages": (messages, MESSAGES),
    "/v1/responses": (responses, RESPONSES),
}


def order_of(path: str, request: dict[str, Any]) -> StepOrder:
    dialect, _ = DIALECTS[path]
    return dialect.read_request(json.dumps(request).encode(), KeptResponses()).order  # type: ignore[attr-defined]


def model_with_template(checkpoint: Path, folder: Path) -> Path:
    """A folder with the tokenizer of a checkpoint and the template of this file."""
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")
    return folder


def rendered(template: ChatTemplate, order: StepOrder) -> list[int]:
    """The ids of an order's prompt, as a session renders it."""
    variables = json.loads(order.template or "{}") | ({"tools": json.loads(order.tools)} if order.tools else {})
    chosen = template.with_variables(variables) if variables else template
    return chosen.render([message.for_template() for message in order.messages])
