"""Conversations that a later request continues by the id of a response."""

from __future__ import annotations

from collections import OrderedDict

from heddle_dask.chat.conversation import ChatMessage
from heddle_dask.gateway.orders import OrderRefused

_MOST_RESPONSES = 128


class KeptResponses:
    """The latest conversations of one key. Messages that they share are kept once."""

    def __init__(self) -> None:
        self._conversations: OrderedDict[str, tuple[ChatMessage, ...]] = OrderedDict()
        self._latest: dict[ChatMessage, ChatMessage] = {}

    def conversation(self, response_id: str) -> tuple[ChatMessage, ...]:
        """The messages up to and with that answer; `OrderRefused` if it is not kept."""
        found = self._conversations.get(response_id)
        if found is None:
            raise OrderRefused(
                f"previous_response_id: {response_id[:80]!r} is not kept: send the whole input", "invalid_request"
            )
        return found

    def keep(self, response_id: str, messages: tuple[ChatMessage, ...]) -> None:
        shared = tuple(self._latest.get(message, message) for message in messages)
        self._latest = {message: message for message in shared}
        self._conversations[response_id] = shared
        while len(self._conversations) > _MOST_RESPONSES:
            self._conversations.popitem(last=False)
