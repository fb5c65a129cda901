"""What every dialect does: read a request, write its answer, its stream and its errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from heddle_dask.chat.conversation import ChatMessage
from heddle_dask.gateway.orders import OrderRefused, RefusalKind, StepAnswer, StepOrder
from heddle_dask.gateway.text_holder import TextPart

STATUS_OF: Mapping[RefusalKind, int] = {
    "invalid_request": 400,
    "authentication": 401,
    "not_found": 404,
    "too_large": 413,
    "context_length": 400,
    "budget": 403,
    "overloaded": 429,
    "failed": 500,
}
"""The HTTP status of each refusal. 403 is one that clients do not try again."""

compact = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False).encode


class AnswerEvents(Protocol):
    """One answer as server-sent events; every method returns the bytes to send now.

    Attributes
    ----------
    told_in_stream
        Refusals that clients of this API read from a stream and not from a status, even before any text.
    """

    told_in_stream: frozenset[RefusalKind]

    def opening(self) -> bytes:
        """What comes before all else."""

    def alive(self) -> bytes:
        """What tells a client that waits that the step is still to come."""

    def part(self, choice: int, part: TextPart) -> bytes:
        """More text of a choice."""

    def ending(self, answer: StepAnswer) -> bytes:
        """The calls, the ends, and what comes after all else."""

    def failure(self, refused: OrderRefused) -> bytes:
        """The end of a stream that has begun and has no answer."""


class ReadRequest(Protocol):
    """A request of a dialect, read."""

    @property
    def order(self) -> StepOrder: ...

    def response(self, answer: StepAnswer) -> Mapping[str, Any]:
        """The answer as one JSON object."""

    def events(self) -> AnswerEvents: ...


class KeptConversations(Protocol):
    """Conversations of one key that a later request may name."""

    def conversation(self, response_id: str) -> tuple[ChatMessage, ...]:
        """The messages up to and with that answer.

        Raises
        ------
        OrderRefused
            It is not kept.
        """

    def keep(self, response_id: str, messages: tuple[ChatMessage, ...]) -> None: ...


class AgentDialect(Protocol):
    """One API; a module can be one."""

    def read_request(self, body: bytes, kept: KeptConversations, /) -> ReadRequest:
        """Read the body of a request.

        Raises
        ------
        BadInput
            It is no request of this API, or asks for what there is not.
        """

    def error_body(self, refused: OrderRefused, /) -> Mapping[str, Any]:
        """The body of an error in the API's own form."""


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {compact(data)}\n\n".encode("utf-8", "backslashreplace")
