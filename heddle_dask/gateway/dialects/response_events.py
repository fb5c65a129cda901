"""A response of OpenAI's Responses as events of its items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from heddle_dask.gateway.dialects.contract import event
from heddle_dask.gateway.dialects.offered_tools import OfferedTools
from heddle_dask.gateway.dialects.openai_errors import openai_error
from heddle_dask.gateway.dialects.response_items import (
    call_item,
    message_item,
    new_id,
    reasoning_item,
    text_part,
)
from heddle_dask.gateway.orders import OrderRefused, RefusalKind, StepAnswer
from heddle_dask.gateway.text_holder import PartKind, TextPart


class RunningResponse(Protocol):
    """The bodies of one response in its stages."""

    @property
    def tools(self) -> OfferedTools: ...

    def begun(self) -> dict[str, Any]: ...

    def failed(self, error: Mapping[str, Any], /) -> dict[str, Any]: ...

    def ended(self, answer: StepAnswer, output: list[dict[str, Any]], /) -> dict[str, Any]: ...


class ResponseEvents:
    """The events of one response, numbered."""

    told_in_stream: frozenset[RefusalKind] = frozenset({"context_length", "budget"})

    def __init__(self, response: RunningResponse) -> None:
        self._response = response
        self._number = -1
        self._output: list[dict[str, Any]] = []
        self._open: PartKind | None = None
        self._item_id = ""
        self._texts: list[str] = []

    def opening(self) -> bytes:
        begun = {"response": self._response.begun()}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def alive(self) -> bytes:
        # An event and no comment: some clients count the seconds between events.
        return self._event("response.in_progress", {"response": self._response.begun()})

    def part(self, choice: int, part: TextPart) -> bytes:
        begun = b""
        if self._open != part.kind:
            begun = self._end_item() + self._begin_item(part.kind)
        self._texts.append(part.text)
        name = "response.reasoning_text.delta" if part.kind == "thinking" else "response.output_text.delta"
        return begun + self._event(name, {**self._at(), "delta": part.text, **self._no_logprobs()})

    def ending(self, answer: StepAnswer) -> bytes:
        choice, sent = answer.choices[0], b""
        cut = choice.finish_reason == "length"
        if self._open is None and not self._output and not choice.message.calls:
            sent += self._begin_item("content")
        sent += self._end_item("incomplete" if cut else "completed")
        for call in choice.message.calls:
            sent += self._whole_call(call_item(call, self._response.tools))
        ended = {"response": self._response.ended(answer, self._output)}
        return sent + self._event("response.incomplete" if cut else "response.completed", ended)

    def failure(self, refused: OrderRefused) -> bytes:
        error = openai_error(refused)["error"]
        told = {"code": error["code"] or error["type"], "message": error["message"]}
        return self._event("response.failed", {"response": self._response.failed(told)})

    def _begin_item(self, kind: PartKind) -> bytes:
        self._open, self._texts = kind, []
        if kind == "thinking":
            self._item_id = new_id("rs")
            return self._added(reasoning_item("", self._item_id, done=False))
        self._item_id = new_id("msg")
        added = self._added(message_item("", self._item_id, done=False))
        return added + self._event("response.content_part.added", {**self._at(), "part": text_part("")})

    def _end_item(self, status: str = "completed") -> bytes:
        if self._open is None:
            return b""
        text = "".join(self._texts)
        if self._open == "thinking":
            done = self._event("response.reasoning_text.done", {**self._at(), "text": text})
            item = reasoning_item(text, self._item_id)
        else:
            done = self._event("response.output_text.done", {**self._at(), "text": text, **self._no_logprobs()})
            done += self._event("response.content_part.done", {**self._at(), "part": text_part(text)})
            item = message_item(text, self._item_id, status=status)
        self._open = None
        return done + self._done(item)

    def _whole_call(self, item: dict[str, Any]) -> bytes:
        """The events of a call, all at once."""
        field, name = {
            "function_call": ("arguments", "response.function_call_arguments"),
            "custom_tool_call": ("input", "response.custom_tool_call_input"),
        }.get(item["type"], ("", ""))
        if not field:
            return self._added({**item, "status": "in_progress"}) + self._done(item)
        at = {"item_id": item["id"], "output_index": len(self._output)}
        sent = self._added({**item, field: "", "status": "in_progress"})
        sent += self._event(f"{name}.delta", {**at, "delta": item[field]})
        sent += self._event(f"{name}.done", {**at, field: item[field], "name": item["name"]})
        return sent + self._done(item)

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": len(self._output), "content_index": 0}

    def _no_logprobs(self) -> dict[str, Any]:
        return {} if self._open == "thinking" else {"logprobs": []}

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", {"output_index": len(self._output), "item": item})

    def _done(self, item: dict[str, Any]) -> bytes:
        self._output.append(item)
        return self._event("response.output_item.done", {"output_index": len(self._output) - 1, "item": item})

    def _event(self, name: str, data: Mapping[str, Any]) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number, **data}, name)
