"""The tools that a request offers: shown to the model as functions, and named again in the API's words.

An API has more kinds of tools than a chat template: a custom tool takes free text, a local shell a command, and tools
of a namespace share a prefix. The model sees functions; a call of one goes back as what it was offered as. Tools that
run at the API's vendor (search in the web, images) are left out: the model is not told of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from heddle_dask.core.errors import BadInput

OfferedKind = Literal["function", "custom", "local_shell"]
LOCAL_SHELL = "local_shell"
_TEXT_FIELD = "input"
_FREE_TEXT = {
    "type": "object",
    "properties": {_TEXT_FIELD: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [_TEXT_FIELD],
    "additionalProperties": False,
}
_SHELL = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The command and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
    "additionalProperties": False,
}


@dataclass(slots=True)
class OfferedTools:
    """The tools of one request, filled in by its dialect."""

    _schemas: list[dict[str, Any]] = field(default_factory=list)
    _kinds: dict[str, OfferedKind] = field(default_factory=dict)
    _namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add_function(self, function: Mapping[str, Any], where: str, *, namespace: str = "") -> None:
        """A function by its name, description and parameters."""
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise BadInput(f"{where}: a tool needs a name")
        shown = flat_name(namespace, name)
        if namespace:
            self._namespaces[shown] = (namespace, name)
        # As vLLM shows it to the template: these are null where the request has none, and those are left out.
        schema: dict[str, Any] = {"name": shown} | {key: function.get(key) for key in ("description", "parameters")}
        schema |= {key: function[key] for key in ("strict", "defer_loading") if function.get(key) is not None}
        self._schemas.append({"type": "function", "function": schema})
        self._kinds[shown] = "function"

    def add_custom(self, tool: Mapping[str, Any], where: str) -> None:
        """A tool that takes free text."""
        self.add_function({**tool, "parameters": _FREE_TEXT}, where)
        self._kinds[str(tool["name"])] = "custom"

    def add_local_shell(self) -> None:
        shell = {"name": LOCAL_SHELL, "description": "Runs a shell command and returns its output."}
        self.add_function({**shell, "parameters": _SHELL}, LOCAL_SHELL)
        self._kinds[LOCAL_SHELL] = "local_shell"

    @property
    def text(self) -> str:
        """JSON text of the functions that the model sees; empty: none."""
        return json.dumps(self._schemas, ensure_ascii=False) if self._schemas else ""

    def kind_of(self, name: str) -> OfferedKind:
        return self._kinds.get(name, "function")

    def called_by(self, name: str) -> tuple[str, str]:
        """Namespace (empty: none) and name of a tool, of the name that the model has used."""
        return self._namespaces.get(name, ("", name))

    def choice_of(self, name: object, where: str) -> str:
        """The `tool_choice` of an order that demands this tool."""
        if name not in self._kinds:
            raise BadInput(f"{where}: there is no tool {str(name)[:60]!r} in tools")
        return f"tool:{name}"


def flat_name(namespace: str, name: str) -> str:
    """The name by which the model sees a tool of a namespace; vLLM's form."""
    return f"{namespace}__{name}" if namespace else name


def free_text_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return json.dumps({_TEXT_FIELD: text}, ensure_ascii=False)


def free_text_of(arguments: str) -> str:
    """The free text of a call; arguments of another form as they are."""
    text = object_of(arguments).get(_TEXT_FIELD)
    return text if isinstance(text, str) else arguments


def object_of(arguments: str) -> dict[str, Any]:
    """The arguments as an object; empty where they are none."""
    try:
        value = json.loads(arguments or "{}", strict=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def named_choices(choice: Mapping[str, Any]) -> Iterable[Any]:
    """The names in an ``allowed_tools`` choice."""
    for tool in choice.get("tools") or ():
        if isinstance(tool, Mapping):
            yield tool.get("name") or (tool.get("function") or {}).get("name")
