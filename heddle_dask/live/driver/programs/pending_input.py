"""What a program has appended to its context and no step has sent yet: messages, or raw tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from heddle_dask.chat.content_spans import TEMPLATE_TEXT, Rendering
from heddle_dask.chat.conversation import ChatMessage
from heddle_dask.chat.reply_parts import answer_of
from heddle_dask.chat.template import ChatTemplate
from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Role
from heddle_dask.records.token_record import Attribution, TokenRecord

_ATTRIBUTION: Mapping[str, Attribution] = {
    "system": Attribution.PROMPT,
    "user": Attribution.PROMPT,
    # Written by the program and not sampled: an example, or the beginning of the reply.
    "assistant": Attribution.PROMPT,
    "tool": Attribution.TOOL,
}


class PendingInput:
    """Appended messages and tokens; each is rendered into the record once, as a masked delta."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template  # renders the messages
        # Whether the record ends with a whole turn; False: what is rendered next has to end the policy's turn first.
        self.turn_ended = True
        self.end_id: int | None = None  # the sampled token that ended it
        self.last_reply = ""  # until something follows it
        self._messages: list[dict[str, Any]] = []
        self._tokens: list[int] = []
        self._rendered: Rendering | None = None

    def copy(self) -> PendingInput:
        """The same pending input for a branch that goes on by itself."""
        other = PendingInput(self.template)
        other.turn_ended, other.end_id, other.last_reply = self.turn_ended, self.end_id, self.last_reply
        other._messages, other._tokens = list(self._messages), list(self._tokens)
        other._rendered = self._rendered
        return other

    def append(self, record: TokenRecord, role: Role, text: str, first_step: bool) -> None:
        """Add a message; tokens that were added before are rendered first.

        Raises
        ------
        BadInput
            An unknown role, a content that is no text, or the reply itself, which the context has kept.
        """
        _check_role(role)
        if not isinstance(text, str):
            raise BadInput(_not_text(text))
        if role == "assistant" and text.strip() and text.strip() in (self.last_reply, answer_of(self.last_reply)):
            raise BadInput("append: this is the reply, which the context has kept as it was sampled: leave it out")
        self._add(record, {"role": role, "content": text}, first_step)

    def append_message(self, record: TokenRecord, message: ChatMessage, first_step: bool) -> None:
        """Add a message that may have thinking and calls of tools.

        Raises
        ------
        BadInput
            An unknown role.
        """
        _check_role(message.role)
        self._add(record, message.for_template(), first_step)

    def _add(self, record: TokenRecord, message: dict[str, Any], first_step: bool) -> None:
        self.last_reply = ""
        if self._tokens:
            self.render(record, first_step)
        self._messages.append(message)
        self._rendered = None

    def append_tokens(self, record: TokenRecord, token_ids: Sequence[int], first_step: bool) -> None:
        """Add raw tokens; messages that were added before are rendered first.

        Raises
        ------
        BadInput
            They are no token ids.
        """
        tokens = _checked_tokens(token_ids)
        if self._messages:
            self.render(record, first_step)
        self._tokens += tokens
        self.last_reply = ""

    def replied(self, text: str, last_id: int | None) -> None:
        """A turn was sampled, which ends with this token."""
        self.turn_ended = last_id in self.template.end_token_ids
        self.end_id = last_id if self.turn_ended else None
        self.last_reply = text.strip()

    def tokens(self, record_tokens: int) -> int:
        """Number of tokens that `render` would add to a record; what is appended later still joins the same delta."""
        if not self._messages:
            return len(self._tokens)
        return len(self._rendering(record_tokens).token_ids)

    def render(self, record: TokenRecord, first_step: bool) -> None:
        """Move everything into the record; raw tokens are a prompt before the first step, and a tool's after it."""
        if self._tokens:
            record.append(self._tokens, Attribution.PROMPT if first_step else Attribution.TOOL)
            self._tokens = []
        if not self._messages:
            return
        rendering, messages = self._rendering(len(record)), self._messages
        self._messages, self._rendered = [], None
        # The policy's turn has begun: a message that no step has come before has to end it.
        self.turn_ended, self.end_id = False, None
        _append(record, rendering, [_ATTRIBUTION[message["role"]] for message in messages])

    def _rendering(self, record_tokens: int) -> Rendering:
        if self._rendered is None:
            self._rendered = (
                self.template.following(self._messages, ended=self.turn_ended, end_id=self.end_id)
                if record_tokens
                else self.template.opening(self._messages)
            )
        return self._rendered


def _check_role(role: object) -> None:
    if not isinstance(role, str) or role not in _ATTRIBUTION:
        raise BadInput(f"append: role is {role!r}: use {', '.join(_ATTRIBUTION)}")


def _append(record: TokenRecord, rendering: Rendering, authors: Sequence[Attribution]) -> None:
    """Add a delta; where contents cannot be told from the template's text, all of it is the last message's."""
    if rendering.owners is None:
        record.append(rendering.token_ids, authors[-1])
        return
    of_owner = {TEMPLATE_TEXT: Attribution.TEMPLATE, **dict(enumerate(authors))}
    each: npt.NDArray[np.uint8] = np.array([of_owner[owner] for owner in rendering.owners], np.uint8)
    cuts = (np.flatnonzero(np.diff(each)) + 1).tolist()
    for start, stop in zip([0, *cuts], [*cuts, len(each)], strict=True):
        if start < stop:
            record.append(rendering.token_ids[start:stop], Attribution(int(each[start])))


def _not_text(content: object) -> str:
    parts = content if isinstance(content, list | tuple) else [content]
    kinds = [str(part.get("type")) for part in parts if isinstance(part, Mapping)]
    for kind in ("image", "audio", "video"):
        if any(kind in each for each in kinds):
            return f"append: the content has a part of type {kind}: only text is supported, so give a text"
    return f"append: the content is a {type(content).__name__}: give a text"


def _checked_tokens(token_ids: object) -> list[int]:
    try:
        ids = np.asarray(token_ids)
    except (TypeError, ValueError):
        ids = np.empty(0, object)
    if ids.ndim == 1 and not ids.size and isinstance(token_ids, Sequence) and not isinstance(token_ids, str | bytes):
        return []
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise BadInput("append_tokens: use a flat sequence of token ids, which are whole numbers")
    if int(ids.min()) < 0 or int(ids.max()) >= 2**31:
        raise BadInput("append_tokens: a token id is negative or does not fit 31 bits")
    return [int(token) for token in ids]
